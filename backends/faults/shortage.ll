; A thread that ends a run which makes no progress because memory is short.  It touches a few pages,
; which the caller locks: in such a process all others may be out.
;
; The state is 64-bit numbers: 0 progress, 1 whether work is under way, 2 whether to stop, 3 major
; faults that prove a shortage, 4 whether memory is short, 5 whether the program has taken notice,
; 6 text and 7 its length, 8 status to end with, 9 a `pollfd` that becomes readable when the thread
; is to stop, 10 descriptor of /proc/self/statm, 12 regions; then the address and bytes of each.

%rusage = type [18 x i64]

declare i32 @poll(ptr, i64, i32)
declare i32 @getrusage(i32, ptr)
declare i64 @write(i32, ptr, i64)
declare i64 @pread(i32, ptr, i64, i64)
declare void @_exit(i32)

@pi2_text = internal global [64 x i8] zeroinitializer, align 64
@pi2_usage = internal global %rusage zeroinitializer, align 64

define internal i64 @get(ptr %state, i64 %number) {
  %place = getelementptr i64, ptr %state, i64 %number
  %value = load atomic i64, ptr %place seq_cst, align 8
  ret i64 %value
}

define internal void @put(ptr %state, i64 %number, i64 %value) {
  %place = getelementptr i64, ptr %state, i64 %number
  store atomic i64 %value, ptr %place seq_cst, align 8
  ret void
}

; Waits for a quarter of a second, or until it is told to stop.
define internal void @rest(ptr %state) {
  %wakes = getelementptr i64, ptr %state, i64 9
  %ready = call i32 @poll(ptr %wakes, i64 1, i32 250)
  ret void
}

define internal i64 @count_faults() {
  %done = call i32 @getrusage(i32 0, ptr @pi2_usage)
  ; ru_majflt follows two times and six numbers
  %place = getelementptr i64, ptr @pi2_usage, i64 9
  %faults = load i64, ptr %place
  ret i64 %faults
}

define internal void @release(ptr %state) {
entry:
  %count = call i64 @get(ptr %state, i64 12)
  br label %look

look:
  %number = phi i64 [ 0, %entry ], [ %next, %cover ]
  %more = icmp slt i64 %number, %count
  br i1 %more, label %cover, label %done

cover:
  %twice = shl i64 %number, 1
  %first = add i64 %twice, 13
  %second = add i64 %twice, 14
  %address = call i64 @get(ptr %state, i64 %first)
  %size = call i64 @get(ptr %state, i64 %second)
  %target = inttoptr i64 %address to ptr
  ; zeros instead: PROT_READ | PROT_WRITE; MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE
  %made = call ptr @mmap(ptr %target, i64 %size, i32 3, i32 16434, i32 -1, i64 0)
  %next = add i64 %number, 1
  br label %look

done:
  ret void
}

; Memory of the process in pages, by `statm`: the second number.
define internal i64 @count_pages(ptr %state) {
entry:
  %wide = call i64 @get(ptr %state, i64 10)
  %file = trunc i64 %wide to i32
  %size = call i64 @pread(i32 %file, ptr @pi2_text, i64 63, i64 0)
  br label %look

look:
  %place = phi i64 [ 0, %entry ], [ %next, %more ]
  %words = phi i64 [ 0, %entry ], [ %passed, %more ]
  %value = phi i64 [ 0, %entry ], [ %grown, %more ]
  %known = icmp slt i64 %place, %size
  %early = icmp slt i64 %words, 2
  %goes = and i1 %known, %early
  br i1 %goes, label %more, label %done

more:
  %where = getelementptr i8, ptr @pi2_text, i64 %place
  %byte = load i8, ptr %where
  %space = icmp eq i8 %byte, 32
  %one = zext i1 %space to i64
  %passed = add i64 %words, %one
  %wider = zext i8 %byte to i64
  %digit = sub i64 %wider, 48
  %ten = mul i64 %value, 10
  %sum = add i64 %ten, %digit
  %second = icmp eq i64 %words, 1
  %counts = xor i1 %space, true
  %adds = and i1 %second, %counts
  %grown = select i1 %adds, i64 %sum, i64 %value
  %next = add i64 %place, 1
  br label %look

done:
  ret i64 %value
}

; Returns when it is told to stop, or when the program has taken notice of a shortage: `ticks`
; quarters of a second without progress in which many pages came in, and memory did not grow.
define void @pi2_watch_memory(ptr %state, i64 %ticks) {
entry:
  br label %restart

restart:
  %start_faults = call i64 @count_faults()
  %start_pages = call i64 @count_pages(ptr %state)
  %start_progress = call i64 @get(ptr %state, i64 0)
  br label %look

look:
  %quarters = phi i64 [ 0, %restart ], [ %more, %judge ], [ %more, %count ]
  call void @rest(ptr %state)
  %stop = call i64 @get(ptr %state, i64 2)
  %stops = icmp ne i64 %stop, 0
  br i1 %stops, label %over, label %measure

measure:
  %progress = call i64 @get(ptr %state, i64 0)
  %works = call i64 @get(ptr %state, i64 1)
  %same = icmp eq i64 %progress, %start_progress
  %busy = icmp ne i64 %works, 0
  %stalls = and i1 %same, %busy
  br i1 %stalls, label %weigh, label %restart

weigh:
  %pages = call i64 @count_pages(ptr %state)
  %growth = sub i64 %pages, %start_pages
  %least = call i64 @get(ptr %state, i64 3)
  %half = lshr i64 %least, 1
  %grows = icmp sge i64 %growth, %half
  br i1 %grows, label %restart, label %count

count:
  %more = add i64 %quarters, 1
  %long = icmp sge i64 %more, %ticks
  br i1 %long, label %judge, label %look

judge:
  %faults = call i64 @count_faults()
  %own = sub i64 %faults, %start_faults
  %many = icmp sge i64 %own, %least
  br i1 %many, label %tell, label %look

tell:
  call void @put(ptr %state, i64 4, i64 1)
  br label %let_go

let_go:
  call void @release(ptr %state)
  br label %await

await:
  %left = phi i64 [ %ticks, %let_go ], [ %fewer, %still ]
  call void @rest(ptr %state)
  %noticed = call i64 @get(ptr %state, i64 5)
  %ended = call i64 @get(ptr %state, i64 2)
  %either = or i64 %noticed, %ended
  %is_told = icmp ne i64 %either, 0
  br i1 %is_told, label %over, label %still

still:
  %fewer = sub i64 %left, 1
  %patient = icmp sgt i64 %fewer, 0
  br i1 %patient, label %await, label %end

end:
  %text = call i64 @get(ptr %state, i64 6)
  %length = call i64 @get(ptr %state, i64 7)
  %status = call i64 @get(ptr %state, i64 8)
  %code = trunc i64 %status to i32
  %start = inttoptr i64 %text to ptr
  %written = call i64 @write(i32 2, ptr %start, i64 %length)
  call void @_exit(i32 %code)
  unreachable

over:
  ret void
}
