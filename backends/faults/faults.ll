; What a thread does that reads a mapped page whose file has been cut, or whose disk fails: zeros are
; mapped in the place of the rest of the range, the fault is noted, and the thread goes on.
;
; A range is its first address, the address behind it, how many faults it had, and the address of the
; first one.  Other faults are for the handler that was there before.

%range = type { i64, i64, i64, i64 }

@pi2_ranges = global [RANGES x %range] zeroinitializer, align 64
@pi2_before = global [256 x i8] zeroinitializer, align 16  ; struct sigaction of the handler before
@pi2_page = global i64 4096

declare ptr @mmap(ptr, i64, i32, i32, i32, i64)
declare i32 @sigaction(i32, ptr, ptr)

define void @pi2_note_fault(i32 %signal, ptr %facts, ptr %context) {
entry:
  ; siginfo_t: three numbers, then the address, at a multiple of 8
  %place = getelementptr i8, ptr %facts, i64 16
  %address = load i64, ptr %place
  br label %look

look:
  %number = phi i64 [ 0, %entry ], [ %following, %next ]
  %known = icmp ult i64 %number, RANGES
  br i1 %known, label %compare, label %foreign

compare:
  %range = getelementptr [RANGES x %range], ptr @pi2_ranges, i64 0, i64 %number
  %first = load atomic i64, ptr %range monotonic, align 8
  %behind = getelementptr %range, ptr %range, i64 0, i32 1
  %end = load atomic i64, ptr %behind monotonic, align 8
  %above = icmp uge i64 %address, %first
  %below = icmp ult i64 %address, %end
  %inside = and i1 %above, %below
  br i1 %inside, label %cover, label %next

next:
  %following = add i64 %number, 1
  br label %look

cover:
  %size = load i64, ptr @pi2_page
  %mask = sub i64 0, %size
  %page = and i64 %address, %mask
  %length = sub i64 %end, %page
  %target = inttoptr i64 %page to ptr
  ; PROT_READ | PROT_WRITE; MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE
  %made = call ptr @mmap(ptr %target, i64 %length, i32 3, i32 16434, i32 -1, i64 0)
  %done = icmp eq ptr %made, %target
  br i1 %done, label %note, label %foreign

note:
  %counter = getelementptr %range, ptr %range, i64 0, i32 2
  %before = atomicrmw add ptr %counter, i64 1 seq_cst
  %is_first = icmp eq i64 %before, 0
  br i1 %is_first, label %keep, label %over

keep:
  %where = getelementptr %range, ptr %range, i64 0, i32 3
  store atomic i64 %address, ptr %where release, align 8
  br label %over

foreign:
  ; the same instruction faults again when the handler has returned
  %put = call i32 @sigaction(i32 %signal, ptr @pi2_before, ptr null)
  br label %over

over:
  ret void
}
