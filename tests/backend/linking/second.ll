@factor = constant double 2.0, align 8
@factors = global ptr null
@llvm.global_ctors = appending global [1 x { i32, ptr, ptr }]
  [{ i32, ptr, ptr } { i32 65535, ptr @start, ptr null }]
define internal void @start() {
  store ptr @factor, ptr @factors
  ret void
}
define i64 @choose() {
  ret i64 2
}
define i64 @double(i64 %value) {
  %place = load ptr, ptr @factors
  %factor = load double, ptr %place
  %wide = sitofp i64 %value to double
  %product = fmul double %wide, %factor
  %third = fdiv double %product, 3.0
  %again = fmul double %third, 3.0
  %rounded = call double @llvm.rint.f64(double %again)
  %result = fptosi double %rounded to i64
  ret i64 %result
}
declare double @llvm.rint.f64(double)
