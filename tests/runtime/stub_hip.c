/* A libamdhip64.so without a GPU: writes what it is called with to $STUB_HIP_LOG; errors as $STUB_HIP_FAIL says. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread int current;

static void say(const char *format, ...) {
  FILE *file = fopen(getenv("STUB_HIP_LOG"), "a");
  __builtin_va_list list;
  __builtin_va_start(list, format);
  vfprintf(file, format, list);
  __builtin_va_end(list);
  fclose(file);
}

/* STUB_HIP_FAIL is "function status" */
static int failure(const char *function) {
  const char *fail = getenv("STUB_HIP_FAIL");
  size_t length = strlen(function);
  return fail && strncmp(fail, function, length) == 0 && fail[length] == ' ' ? atoi(fail + length) : 0;
}

int hipInit(unsigned flags) { return failure("hipInit"); }
int hipGetDeviceCount(int *count) { *count = 2; return 0; }
int hipGetDevice(int *device) { *device = current; return 0; }
int hipSetDevice(int device) { say("set device %d\n", device); current = device; return 0; }
int hipGetLastError(void) { say("clear error\n"); return 0; }
const char *hipGetErrorString(int status) { return status == 209 ? "no binary for this GPU" : "text of the stub"; }

int hipDeviceGetPCIBusId(char *text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", 0xc1 + device);
  return 0;
}

int hipModuleLoadData(void **module, const void *image) {
  say("load %s on %d\n", (const char *)image, current);
  *module = (void *)(uintptr_t)0x1234567890;
  return failure("hipModuleLoadData");
}

int hipModuleGetFunction(void **function, void *module, const char *name) {
  say("function %s of %lx\n", name, (long)(uintptr_t)module);
  *function = (void *)(uintptr_t)0xabcdef0123;
  return failure("hipModuleGetFunction");
}

int hipHostMalloc(void **address, size_t bytes, unsigned flags) {
  say("host memory %zu bytes flags %x on %d\n", bytes, flags, current);
  *address = aligned_alloc(8, bytes);
  return failure("hipHostMalloc");
}

int hipStreamIsCapturing(void *stream, int *status) {
  say("capturing %lx on %d\n", (long)(uintptr_t)stream, current);
  *status = getenv("STUB_HIP_CAPTURING") != NULL;
  return 0;
}

int hipStreamSynchronize(void *stream) {
  say("wait %lx on %d\n", (long)(uintptr_t)stream, current);
  return failure("hipStreamSynchronize");
}

int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared, void *stream, void **parameters, void **extra) {
  if (parameters || extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4] != (void *)3) return 1;
  int status = failure("hipModuleLaunchKernel");
  if (status) return status;
  char bytes[1024] = "";
  for (size_t i = 0, size = *(size_t *)extra[3]; i < size; i++)
    sprintf(bytes + 3 * i, " %02x", ((unsigned char *)extra[1])[i]);
  say("launch %lx grid %u %u %u block %u %u %u shared %u stream %lx device %d:%s\n", (long)(uintptr_t)function, gx, gy,
      gz, bx, by, bz, shared, (long)(uintptr_t)stream, current, bytes);
  return 0;
}
