// Calls one compiled kernel from a program without TVM: for kernels of an emulated machine.
//
// stdin: int32 number of arguments, then each: int32 kind (0 integer, 1 float, 2 array), and an
// int64, a double, or int32 type code, int32 bits, int64 elements and the bytes of the array.
// stdout: int32 status of the kernel, then the bytes of every array.
// The kernel is the symbol KERNEL, given on the compiler's command line.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  void *data;
  int32_t device_type, device_id;
  int32_t dimensions;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} Tensor;

typedef struct {
  int32_t type;
  uint32_t padding;
  union {
    int64_t integer;
    double real;
    void *pointer;
  };
} Argument;

typedef struct {
  void *sync;
  int32_t tasks;
} Group;

enum { MOST = 64, INTEGER = 1, REAL = 3, TENSOR_POINTER = 7 };

int KERNEL(void *self, const Argument *arguments, int32_t count, Argument *result);

// Two tasks, one after the other: enough to see how work is divided.
static int launch(int (*run)(int, Group *, void *), void *closure, int tasks) {
  Group group = {NULL, tasks ? tasks : 2};
  for (int task = 0; task < group.tasks; ++task) {
    int status = run(task, &group, closure);
    if (status) return status;
  }
  return 0;
}

int (*__TVMBackendParallelLaunch)(int (*)(int, Group *, void *), void *, int) = launch;

void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  fprintf(stderr, "%s: ", kind);
  for (int i = 0; i < count; ++i) fputs(parts[i], stderr);
  fputc('\n', stderr);
}

static void read_all(void *target, size_t size) {
  if (fread(target, 1, size, stdin) != size) exit(9);
}

int main(void) {
  static Argument arguments[MOST];
  static Tensor tensors[MOST];
  static int64_t shapes[MOST];
  int32_t count;
  read_all(&count, sizeof count);
  for (int i = 0; i < count; ++i) {
    int32_t kind;
    read_all(&kind, sizeof kind);
    if (kind == 0) {
      arguments[i].type = INTEGER;
      read_all(&arguments[i].integer, 8);
    } else if (kind == 1) {
      arguments[i].type = REAL;
      read_all(&arguments[i].real, 8);
    } else {
      int32_t type[2];
      read_all(type, sizeof type);
      read_all(&shapes[i], 8);
      size_t size = shapes[i] * type[1] / 8;
      Tensor tensor = {.device_type = 1, .dimensions = 1, .code = type[0], .bits = type[1],
                       .lanes = 1, .shape = &shapes[i]};
      tensor.data = aligned_alloc(64, (size + 127) / 64 * 64);
      read_all(tensor.data, size);
      tensors[i] = tensor;
      arguments[i].type = TENSOR_POINTER;
      arguments[i].pointer = &tensors[i];
    }
  }
  Argument result = {0};
  int32_t status = KERNEL(NULL, arguments, count, &result);
  fwrite(&status, sizeof status, 1, stdout);
  for (int i = 0; i < count; ++i)
    if (arguments[i].type == TENSOR_POINTER)
      fwrite(tensors[i].data, tensors[i].bits / 8, shapes[i], stdout);
  return 0;
}
