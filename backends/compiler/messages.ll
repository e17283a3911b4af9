; What compiled functions need of TVM's runtime, for libraries that run without it: a place for
; messages of failed checks.  `compile.py` adds the target.

@message = internal global [1024 x i8] zeroinitializer
; What computes parallel loops: whoever loads the library puts it there.
@__TVMBackendParallelLaunch = weak global ptr null

declare i64 @strlen(ptr)
declare ptr @memcpy(ptr, ptr, i64)

; What the last failed check has said.
define ptr @pi2_message() {
  ret ptr @message
}

define void @TVMFFIErrorSetRaisedFromCStrParts(ptr %kind, ptr %parts, i32 %count) {
entry:
  br label %look

look:
  %place = phi i32 [ 0, %entry ], [ %following, %put ]
  %used = phi i64 [ 0, %entry ], [ %filled, %put ]
  %more = icmp slt i32 %place, %count
  br i1 %more, label %measure, label %end

measure:
  %entry_of = getelementptr inbounds ptr, ptr %parts, i32 %place
  %part = load ptr, ptr %entry_of
  %length = call i64 @strlen(ptr %part)
  %filled = add i64 %used, %length
  %fits = icmp ult i64 %filled, 1024
  br i1 %fits, label %put, label %end

put:
  %target = getelementptr inbounds i8, ptr @message, i64 %used
  %copied = call ptr @memcpy(ptr %target, ptr %part, i64 %length)
  %following = add i32 %place, 1
  br label %look

end:
  %final = getelementptr inbounds i8, ptr @message, i64 %used
  store i8 0, ptr %final
  ret void
}
