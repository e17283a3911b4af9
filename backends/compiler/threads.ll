; What compiled functions need of TVM's runtime, for libraries that run without it: threads for
; parallel loops, and a place for messages of failed checks.  `ahead.py` adds the target.
;
; TVM's parallel loops call what __TVMBackendParallelLaunch points to, with a function of one task;
; `pi2_start` lets it point to `launch`.  Worker threads are made by whoever loads the library:
; each calls `pi2_work`, which returns after `pi2_stop`.  One launch runs at a time; another one
; meanwhile computes alone.  Idle threads look for work SPINS times, then sleep (futex of Linux).

%env = type { ptr, i32 }  ; TVMParallelGroupEnv: sync handle, tasks

@generation = internal global i32 0, align 64  ; counts launches
@sleepers = internal global i32 0, align 64    ; workers that sleep, or are about to
@left = internal global i32 0, align 64        ; tasks of workers that are not over
@waiting = internal global i32 0, align 64     ; whether the caller sleeps
@busy = internal global i32 0, align 64        ; whether a launch runs
@stopped = internal global i32 0
@failed = internal global i32 0
@spins = internal global i32 0
@task = internal global ptr null
@data = internal global ptr null
@group = internal global %env { ptr null, i32 1 }
@message = internal global [1024 x i8] zeroinitializer
@__TVMBackendParallelLaunch = weak global ptr null

declare i64 @syscall(i64, ...)
declare i64 @strlen(ptr)
declare ptr @memcpy(ptr, ptr, i64)

define internal void @sleep_while(ptr %word, i32 %value) {
  ; FUTEX_WAIT | FUTEX_PRIVATE_FLAG; a word that has changed returns at once
  %done = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %word, i64 128, i32 %value, ptr null)
  ret void
}

define internal void @wake_all(ptr %word) {
  ; FUTEX_WAKE | FUTEX_PRIVATE_FLAG
  %done = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %word, i64 129, i32 2147483647, ptr null)
  ret void
}

define internal i32 @launch(ptr %function, ptr %given, i32 %tasks) {
entry:
  %count = load i32, ptr getelementptr inbounds (%env, ptr @group, i32 0, i32 1)
  %several = icmp sgt i32 %count, 1
  br i1 %several, label %claim, label %alone

claim:
  %pair = cmpxchg ptr @busy, i32 0, i32 1 acq_rel acquire
  %claimed = extractvalue { i32, i1 } %pair, 1
  br i1 %claimed, label %begin, label %alone

alone:
  %own = alloca %env
  store %env { ptr null, i32 1 }, ptr %own
  %only = call i32 %function(i32 0, ptr %own, ptr %given)
  ret i32 %only

begin:
  %others = sub i32 %count, 1
  store ptr %function, ptr @task
  store ptr %given, ptr @data
  store i32 0, ptr @failed
  store i32 0, ptr @waiting
  store atomic i32 %others, ptr @left seq_cst, align 4
  %before = atomicrmw add ptr @generation, i32 1 seq_cst
  %asleep = load atomic i32, ptr @sleepers seq_cst, align 4
  %wake = icmp sgt i32 %asleep, 0
  br i1 %wake, label %rouse, label %compute

rouse:
  call void @wake_all(ptr @generation)
  br label %compute

compute:
  %first = call i32 %function(i32 0, ptr @group, ptr %given)
  %limit = load i32, ptr @spins
  br label %look

look:
  %turn = phi i32 [ 0, %compute ], [ %next, %again ]
  %open = load atomic i32, ptr @left acquire, align 4
  %over = icmp eq i32 %open, 0
  br i1 %over, label %end, label %again

again:
  %next = add i32 %turn, 1
  %patient = icmp slt i32 %next, %limit
  br i1 %patient, label %look, label %rest

rest:
  store atomic i32 1, ptr @waiting seq_cst, align 4
  %still = load atomic i32, ptr @left seq_cst, align 4
  %finished = icmp eq i32 %still, 0
  br i1 %finished, label %end, label %doze

doze:
  call void @sleep_while(ptr @left, i32 %still)
  br label %rest

end:
  %wrong = load i32, ptr @failed
  %status = or i32 %first, %wrong
  store atomic i32 0, ptr @busy release, align 4
  ret i32 %status
}

; Let functions run on `count` threads, the caller's included; returns what `pi2_work` is given.
define i32 @pi2_start(i32 %count, i32 %patience) {
  store i32 %count, ptr getelementptr inbounds (%env, ptr @group, i32 0, i32 1)
  store i32 %patience, ptr @spins
  store i32 0, ptr @stopped
  store ptr @launch, ptr @__TVMBackendParallelLaunch
  %now = load atomic i32, ptr @generation seq_cst, align 4
  ret i32 %now
}

; Compute task `index` (1, 2, ...) of every launch after `since`.
define void @pi2_work(i32 %index, i32 %since) {
entry:
  br label %idle

idle:
  %seen = phi i32 [ %since, %entry ], [ %now, %done ]
  br label %look

look:
  %turn = phi i32 [ 0, %idle ], [ %next, %again ], [ 0, %doze ]
  %now = load atomic i32, ptr @generation acquire, align 4
  %new = icmp ne i32 %now, %seen
  br i1 %new, label %run, label %again

again:
  %next = add i32 %turn, 1
  %limit = load i32, ptr @spins
  %patient = icmp slt i32 %next, %limit
  br i1 %patient, label %look, label %doze

doze:
  %in = atomicrmw add ptr @sleepers, i32 1 seq_cst
  call void @sleep_while(ptr @generation, i32 %seen)
  %out = atomicrmw sub ptr @sleepers, i32 1 seq_cst
  br label %look

run:
  %end = load atomic i32, ptr @stopped acquire, align 4
  %over = icmp ne i32 %end, 0
  br i1 %over, label %leave, label %compute

compute:
  %function = load ptr, ptr @task
  %given = load ptr, ptr @data
  %status = call i32 %function(i32 %index, ptr @group, ptr %given)
  %wrong = icmp ne i32 %status, 0
  br i1 %wrong, label %note, label %count

note:
  store atomic i32 %status, ptr @failed release, align 4
  br label %count

count:
  %before = atomicrmw sub ptr @left, i32 1 seq_cst
  %last = icmp eq i32 %before, 1
  br i1 %last, label %tell, label %done

tell:
  %asleep = load atomic i32, ptr @waiting seq_cst, align 4
  %wake = icmp ne i32 %asleep, 0
  br i1 %wake, label %rouse, label %done

rouse:
  call void @wake_all(ptr @left)
  br label %done

done:
  br label %idle

leave:
  ret void
}

; Let all workers return, and functions run on the caller's thread alone.
define void @pi2_stop() {
  store i32 1, ptr getelementptr inbounds (%env, ptr @group, i32 0, i32 1)
  store atomic i32 1, ptr @stopped seq_cst, align 4
  %before = atomicrmw add ptr @generation, i32 1 seq_cst
  call void @wake_all(ptr @generation)
  ret void
}

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
