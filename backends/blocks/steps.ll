; Runs instructions of a program on all threads, with a barrier after those that say so.
;
; An instruction is 64 bytes: a kernel, a pointer to its arguments, how many items it has, how many
; of them a thread takes at a time at least (at first half of an even share of what is left, as
; memory is slow where a thread begins to read), the next item to take, whether all threads wait after it, the
; first item, and whether it is so little work that one thread does it: the last one that has come to
; wait, before the others go on.
; Worker threads are made by whoever loads the library: each calls `pi2_blocks_work`, which returns
; after `pi2_blocks_stop`.  One run has the workers at a time; another one meanwhile computes alone.
; Threads that wait look SPINS times, then sleep (futex of Linux).  They also compute the parallel
; loops of libraries that TVM has compiled, which call `pi2_blocks_launch`.

%instruction = type { ptr, ptr, i64, i64, i64, i64, i64, i64 }
%env = type { ptr, i32 }                ; TVMParallelGroupEnv: sync handle, tasks
%loop = type { %env, ptr, ptr, i32 }    ; a parallel loop: function, its data, status

@generation = internal global i32 0, align 64  ; counts runs
@sleepers = internal global i32 0, align 64    ; workers that sleep, or are about to
@busy = internal global i32 0, align 64        ; whether a run has the workers
@arrived = internal global i32 0, align 64     ; threads at the barrier
@phase = internal global i32 0, align 64       ; counts barriers
@resting = internal global i32 0, align 64     ; threads that sleep at the barrier
@following = internal global i64 0             ; instruction with which all go on
@stopped = internal global i32 0
@count = internal global i32 1
@spins = internal global i32 1000
@program = internal global ptr null
@first = internal global i64 0
@last = internal global i64 0

declare i64 @syscall(i64, ...)
PAUSE_DECLARATION

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

; Do what one thread does from instruction `begin` on; returns the first one that all do.
define internal i64 @do_alone(ptr %code, i64 %begin, i64 %end, i64 %thread) {
entry:
  br label %look

look:
  %place = phi i64 [ %begin, %entry ], [ %next, %compute ]
  %more = icmp slt i64 %place, %end
  br i1 %more, label %ask, label %done

ask:
  %own = getelementptr inbounds %instruction, ptr %code, i64 %place
  %alone_at = getelementptr inbounds %instruction, ptr %own, i64 0, i32 7
  %alone = load i64, ptr %alone_at
  %is_alone = icmp ne i64 %alone, 0
  br i1 %is_alone, label %compute, label %done

compute:
  %kernel = load ptr, ptr %own
  %arguments_at = getelementptr inbounds %instruction, ptr %own, i64 0, i32 1
  %arguments = load ptr, ptr %arguments_at
  %items_at = getelementptr inbounds %instruction, ptr %own, i64 0, i32 2
  %items = load i64, ptr %items_at
  %first_at = getelementptr inbounds %instruction, ptr %own, i64 0, i32 6
  %first = load i64, ptr %first_at
  call void %kernel(ptr %arguments, i64 %first, i64 %items, i64 %thread)
  %next = add i64 %place, 1
  br label %look

done:
  ret i64 %place
}

; Wait for all threads; returns the instruction with which they go on, after `begin` at the earliest.
define internal i64 @wait_all(ptr %code, i64 %begin, i64 %end, i64 %thread, i32 %threads) {
entry:
  %alone = icmp eq i32 %threads, 1
  br i1 %alone, label %single, label %arrive

single:
  %own = call i64 @do_alone(ptr %code, i64 %begin, i64 %end, i64 %thread)
  ret i64 %own

arrive:
  %now = load atomic i32, ptr @phase acquire, align 4
  %before = atomicrmw add ptr @arrived, i32 1 acq_rel
  %others = sub i32 %threads, 1
  %is_last = icmp eq i32 %before, %others
  br i1 %is_last, label %open, label %look

open:
  %rest = call i64 @do_alone(ptr %code, i64 %begin, i64 %end, i64 %thread)
  store i64 %rest, ptr @following
  store atomic i32 0, ptr @arrived release, align 4
  %old = atomicrmw add ptr @phase, i32 1 seq_cst
  %asleep = load atomic i32, ptr @resting seq_cst, align 4
  %wake = icmp sgt i32 %asleep, 0
  br i1 %wake, label %rouse, label %last

rouse:
  call void @wake_all(ptr @phase)
  br label %last

last:
  ret i64 %rest

look:
  %turn = phi i32 [ 0, %arrive ], [ %next, %again ], [ 0, %doze ]
  %seen = load atomic i32, ptr @phase acquire, align 4
  %opened = icmp ne i32 %seen, %now
  br i1 %opened, label %done, label %again

again:
  PAUSE
  %next = add i32 %turn, 1
  %limit = load i32, ptr @spins
  %patient = icmp slt i32 %next, %limit
  br i1 %patient, label %look, label %doze

doze:
  %in = atomicrmw add ptr @resting, i32 1 seq_cst
  call void @sleep_while(ptr @phase, i32 %now)
  %out = atomicrmw sub ptr @resting, i32 1 seq_cst
  br label %look

done:
  %after = load i64, ptr @following
  ret i64 %after
}

define internal void @execute(ptr %code, i64 %begin, i64 %end, i64 %thread, i32 %threads) {
entry:
  %any = icmp slt i64 %begin, %end
  %twice = shl i32 %threads, 1
  %parts = zext i32 %twice to i64
  br i1 %any, label %step, label %done

step:
  %place = phi i64 [ %begin, %entry ], [ %following, %advance ]
  %own = getelementptr inbounds %instruction, ptr %code, i64 %place
  %kernel = load ptr, ptr %own
  %arguments_at = getelementptr inbounds %instruction, ptr %own, i64 0, i32 1
  %arguments = load ptr, ptr %arguments_at
  %items_at = getelementptr inbounds %instruction, ptr %own, i64 0, i32 2
  %items = load i64, ptr %items_at
  %grain_at = getelementptr inbounds %instruction, ptr %own, i64 0, i32 3
  %grain = load i64, ptr %grain_at
  %next_at = getelementptr inbounds %instruction, ptr %own, i64 0, i32 4
  %waits_at = getelementptr inbounds %instruction, ptr %own, i64 0, i32 5
  %waits = load i64, ptr %waits_at
  br label %take

take:
  %from = load atomic i64, ptr %next_at monotonic, align 8
  br label %choose

choose:
  %seen = phi i64 [ %from, %take ], [ %other, %claim ]
  %left = sub i64 %items, %seen
  %more = icmp sgt i64 %left, 0
  br i1 %more, label %claim, label %finish

claim:
  %half = udiv i64 %left, %parts
  %many = icmp sgt i64 %half, %grain
  %wanted = select i1 %many, i64 %half, i64 %grain
  %to = add i64 %seen, %wanted
  %over = icmp sgt i64 %to, %items
  %until = select i1 %over, i64 %items, i64 %to
  %pair = cmpxchg ptr %next_at, i64 %seen, i64 %until monotonic monotonic
  %other = extractvalue { i64, i1 } %pair, 0
  %claimed = extractvalue { i64, i1 } %pair, 1
  br i1 %claimed, label %compute, label %choose

compute:
  call void %kernel(ptr %arguments, i64 %seen, i64 %until, i64 %thread)
  br label %take

finish:
  %must = icmp ne i64 %waits, 0
  %after = add i64 %place, 1
  br i1 %must, label %barrier, label %advance

barrier:
  %chosen = call i64 @wait_all(ptr %code, i64 %after, i64 %end, i64 %thread, i32 %threads)
  br label %advance

advance:
  %following = phi i64 [ %after, %finish ], [ %chosen, %barrier ]
  %goes = icmp slt i64 %following, %end
  br i1 %goes, label %step, label %done

done:
  ret void
}

; Run instructions `begin` to `end` of a program on all threads, or where `most` is 1 on the caller's
; alone, which is thread 0.
define void @pi2_blocks_run(ptr %code, i64 %begin, i64 %end, i32 %most) {
entry:
  %any = icmp slt i64 %begin, %end
  br i1 %any, label %clear, label %done

clear:
  %place = phi i64 [ %begin, %entry ], [ %following, %clear ]
  %next_at = getelementptr inbounds %instruction, ptr %code, i64 %place, i32 4
  %first_at = getelementptr inbounds %instruction, ptr %code, i64 %place, i32 6
  %item = load i64, ptr %first_at
  store i64 %item, ptr %next_at
  %following = add i64 %place, 1
  %goes = icmp slt i64 %following, %end
  br i1 %goes, label %clear, label %choose

choose:
  %threads = load i32, ptr @count
  %others = icmp sgt i32 %threads, 1
  %wanted = icmp sgt i32 %most, 1
  %several = and i1 %others, %wanted
  br i1 %several, label %claim, label %alone

claim:
  %pair = cmpxchg ptr @busy, i32 0, i32 1 acq_rel acquire
  %claimed = extractvalue { i32, i1 } %pair, 1
  br i1 %claimed, label %together, label %alone

alone:
  call void @execute(ptr %code, i64 %begin, i64 %end, i64 0, i32 1)
  ret void

together:
  store ptr %code, ptr @program
  store i64 %begin, ptr @first
  store i64 %end, ptr @last
  %before = atomicrmw add ptr @generation, i32 1 seq_cst
  %asleep = load atomic i32, ptr @sleepers seq_cst, align 4
  %wake = icmp sgt i32 %asleep, 0
  br i1 %wake, label %rouse, label %start

rouse:
  call void @wake_all(ptr @generation)
  br label %start

start:
  call void @execute(ptr %code, i64 %begin, i64 %end, i64 0, i32 %threads)
  %together_end = call i64 @wait_all(ptr %code, i64 %end, i64 %end, i64 0, i32 %threads)
  store atomic i32 0, ptr @busy release, align 4
  ret void

done:
  ret void
}

; Let runs have `threads`, the caller's included; returns what `pi2_blocks_work` is given.
define i32 @pi2_blocks_start(i32 %threads, i32 %patience) {
  store i32 %threads, ptr @count
  store i32 %patience, ptr @spins
  store i32 0, ptr @stopped
  %now = load atomic i32, ptr @generation seq_cst, align 4
  ret i32 %now
}

; Be thread `index` (1, 2, ...) of every run after `since`.
define void @pi2_blocks_work(i64 %index, i32 %since) {
entry:
  br label %idle

idle:
  %seen = phi i32 [ %since, %entry ], [ %now, %run ]
  br label %look

look:
  %turn = phi i32 [ 0, %idle ], [ %next, %again ], [ 0, %doze ]
  %now = load atomic i32, ptr @generation acquire, align 4
  %new = icmp ne i32 %now, %seen
  br i1 %new, label %begin, label %again

again:
  PAUSE
  %next = add i32 %turn, 1
  %limit = load i32, ptr @spins
  %patient = icmp slt i32 %next, %limit
  br i1 %patient, label %look, label %doze

doze:
  %in = atomicrmw add ptr @sleepers, i32 1 seq_cst
  call void @sleep_while(ptr @generation, i32 %seen)
  %out = atomicrmw sub ptr @sleepers, i32 1 seq_cst
  br label %look

begin:
  %end = load atomic i32, ptr @stopped acquire, align 4
  %over = icmp ne i32 %end, 0
  br i1 %over, label %leave, label %run

run:
  %code = load ptr, ptr @program
  %from = load i64, ptr @first
  %to = load i64, ptr @last
  %threads = load i32, ptr @count
  call void @execute(ptr %code, i64 %from, i64 %to, i64 %index, i32 %threads)
  %run_end = call i64 @wait_all(ptr %code, i64 %to, i64 %to, i64 %index, i32 %threads)
  br label %idle

leave:
  ret void
}

; Let all workers return, and runs compute on the caller's thread alone.
define void @pi2_blocks_stop() {
  store i32 1, ptr @count
  store atomic i32 1, ptr @stopped seq_cst, align 4
  %before = atomicrmw add ptr @generation, i32 1 seq_cst
  call void @wake_all(ptr @generation)
  ret void
}

; The kernel of a parallel loop: items are tasks.
define internal void @do_tasks(ptr %loop, i64 %first, i64 %end, i64 %thread) {
entry:
  %function_at = getelementptr inbounds %loop, ptr %loop, i64 0, i32 1
  %function = load ptr, ptr %function_at
  %data_at = getelementptr inbounds %loop, ptr %loop, i64 0, i32 2
  %data = load ptr, ptr %data_at
  %status_at = getelementptr inbounds %loop, ptr %loop, i64 0, i32 3
  br label %compute

compute:
  %task = phi i64 [ %first, %entry ], [ %next, %compute ]
  %number = trunc i64 %task to i32
  %status = call i32 %function(i32 %number, ptr %loop, ptr %data)
  %before = atomicrmw or ptr %status_at, i32 %status monotonic
  %next = add i64 %task, 1
  %more = icmp slt i64 %next, %end
  br i1 %more, label %compute, label %done

done:
  ret void
}

; Compute a parallel loop, a task for each thread; what `__TVMBackendParallelLaunch` points to.
define i32 @pi2_blocks_launch(ptr %function, ptr %data, i32 %tasks) {
  %loop = alloca %loop, align 64
  %count = load i32, ptr @count
  %items = zext i32 %count to i64
  %a = insertvalue %loop zeroinitializer, i32 %count, 0, 1
  %b = insertvalue %loop %a, ptr %function, 1
  %c = insertvalue %loop %b, ptr %data, 2
  store %loop %c, ptr %loop
  %code = alloca %instruction, align 64
  %d = insertvalue %instruction { ptr @do_tasks, ptr null, i64 0, i64 1, i64 0, i64 0, i64 0, i64 0 }, ptr %loop, 1
  %e = insertvalue %instruction %d, i64 %items, 2
  store %instruction %e, ptr %code
  call void @pi2_blocks_run(ptr %code, i64 0, i64 1, i32 %count)
  %status_at = getelementptr inbounds %loop, ptr %loop, i64 0, i32 3
  %status = load i32, ptr %status_at
  ret i32 %status
}
