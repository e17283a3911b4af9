@numbers = internal global [4 x i64] [i64 1, i64 2, i64 3, i64 4]
@room = internal global [256 x i8] zeroinitializer, align 64
@table = global [2 x ptr] [ptr @numbers, ptr @strlen]
@text = private constant [6 x i8] c"hello\00"
declare i64 @strlen(ptr)
declare ptr @memset(ptr, i32, i64)
declare i64 @double(i64)
define weak i64 @choose() {
  ret i64 1000
}
define i64 @compute() {
  %filled = call ptr @memset(ptr @room, i32 7, i64 256)
  %last = load i8, ptr getelementptr inbounds ([256 x i8], ptr @room, i64 0, i64 255)
  %seven = zext i8 %last to i64
  %list = load ptr, ptr @table
  %place = getelementptr inbounds i64, ptr %list, i64 3
  %four = load i64, ptr %place
  %function = load ptr, ptr getelementptr inbounds ([2 x ptr], ptr @table, i64 0, i64 1)
  %five = call i64 %function(ptr @text)
  %length = call i64 @strlen(ptr @text)
  %ten = call i64 @double(i64 %length)
  %two = call i64 @choose()
  %a = add i64 %seven, %four
  %b = add i64 %five, %ten
  %c = add i64 %a, %b
  %sum = add i64 %c, %two
  ret i64 %sum
}
