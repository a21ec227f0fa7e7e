/* A libcuda.so.1 without a GPU: prints what it is called with, so that a test can check what arrives. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default"))) int

static __thread uintptr_t stack[8];
static __thread int depth;

API cuInit(unsigned flags) { return 0; }
API cuDriverGetVersion(int *version) { *version = 13000; return 0; }
API cuDeviceGetCount(int *count) { *count = 2; return 0; }
API cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
API cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(uintptr_t)(4096 + device); return 0; }
API cuCtxGetCurrent(void **context) { *context = (void *)(depth ? stack[depth - 1] : 0); return 0; }
API cuCtxPushCurrent(void *context) { stack[depth++] = (uintptr_t)context; return 0; }
API cuCtxPopCurrent(void **context) { *context = (void *)stack[--depth]; return 0; }

API cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
  case 1: case 2: case 3: *value = 1024; return 0;       /* threads in a block, block x and y */
  case 4: *value = 64; return 0;                         /* block z */
  case 5: *value = 2147483647; return 0;                 /* grid x */
  case 6: case 7: *value = 65535; return 0;              /* grid y and z */
  case 16: *value = 132; return 0;                       /* multiprocessors */
  case 75: *value = 9; return 0;                         /* compute capability */
  case 76: *value = 0; return 0;
  case 97: *value = 232448; return 0;                    /* shared memory of one block, opt-in */
  default: return 1;
  }
}

API cuModuleLoadDataEx(void **module, const char *image, unsigned count, int *options, void **values) {
  if (strcmp(image, "bad") == 0) {
    for (unsigned i = 0; i < count; i++)
      if (options[i] == 5) snprintf(values[i], 64, "line 1; fatal");
    return 218;
  }
  for (unsigned i = 0; i < count; i++)
    if (options[i] == 6) printf("log bytes %u\n", (unsigned)(uintptr_t)values[i]);
  printf("image %s\n", image);
  *module = (void *)11;
  return 0;
}

API cuModuleGetFunction(void **function, void *module, const char *name) {
  printf("function %s of %d\n", name, (int)(uintptr_t)module);
  *function = (void *)22;
  return 0;
}

API cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : attribute == 4 ? 96 : 0;
  return 0;
}

API cuFuncSetAttribute(void *function, int attribute, int value) {
  printf("attribute %d of %d is %d\n", attribute, (int)(uintptr_t)function, value);
  return 0;
}

API cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
  static const int sizes[] = {4, 128, 8}; /* an i32, a tensor map, an address */
  if (extra) return 1;
  if (gx == 999) return 719;
  printf("launch %d grid %u %u %u block %u %u %u shared %u stream %d context %d:", (int)(uintptr_t)function, gx, gy,
         gz, bx, by, bz, shared, (int)(uintptr_t)stream, (int)stack[depth - 1]);
  for (int p = 0; p < 3; p++) {
    uint32_t sum = 0;
    for (int i = 0; i < sizes[p]; i++) sum = sum * 31 + ((unsigned char *)parameters[p])[i];
    printf(" %08x", sum);
  }
  printf("\n");
  return 0;
}

API cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
  printf("host memory %zu flags %u context %d\n", bytes, flags, (int)stack[depth - 1]);
  *address = aligned_alloc(8, bytes);
  return 0;
}

API cuStreamIsCapturing(void *stream, int *status) {
  *status = (uintptr_t)stream == 78;
  return 0;
}

API cuStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
API cuThreadExchangeStreamCaptureMode(int *mode) { *mode ^= 2; return 0; }
API cuGraphCreate(void **graph, unsigned flags) { *graph = (void *)33; return 0; }

typedef struct { void *function; unsigned grid[3], block[3], shared; void **parameters, **extra; } Node;

static void print_node(const char *what, const Node *node) {
  printf("%s %d grid %u %u %u block %u %u %u shared %u n %d\n", what, (int)(uintptr_t)node->function, node->grid[0],
         node->grid[1], node->grid[2], node->block[0], node->block[1], node->block[2], node->shared,
         *(int *)node->parameters[0]);
}

API cuGraphAddKernelNode(void **added, void *graph, void *const *dependencies, size_t count, const Node *node) {
  static uintptr_t nodes = 43;
  printf("after %d in %d: ", count ? (int)(uintptr_t)dependencies[0] : 0, (int)(uintptr_t)graph);
  print_node("node", node);
  *added = (void *)++nodes;
  return 0;
}

API cuGraphInstantiateWithFlags(void **executable, void *graph, uint64_t flags) {
  *executable = (void *)55;
  return 0;
}

API cuGraphExecKernelNodeSetParams(void *executable, void *changed, const Node *node) {
  printf("%d of %d: ", (int)(uintptr_t)changed, (int)(uintptr_t)executable);
  print_node("set", node);
  return 0;
}

API cuGraphLaunch(void *executable, void *stream) {
  printf("graph %d on %d\n", (int)(uintptr_t)executable, (int)(uintptr_t)stream);
  return 0;
}

API cuGraphExecDestroy(void *executable) { printf("destroy %d\n", (int)(uintptr_t)executable); return 0; }
API cuGraphDestroy(void *graph) { printf("destroy %d\n", (int)(uintptr_t)graph); return 0; }

API cuStreamSynchronize(void *stream) {
  printf("wait %d context %d\n", (int)(uintptr_t)stream, (int)stack[depth - 1]);
  return 0;
}

API cuTensorMapEncodeTiled(uint64_t *map, int dtype, uint32_t rank, void *address, const uint64_t *sizes,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill) {
  if (box[0] == 8) return 1;
  printf("map of type %d at %d:", dtype, (int)(uintptr_t)address);
  for (uint32_t i = 0; i < rank; i++) printf(" %d/%u/%u", (int)sizes[i], box[i], steps[i]);
  for (uint32_t i = 0; i + 1 < rank; i++) printf(" %d", (int)strides[i]);
  printf(" modes %d %d %d %d\n", interleave, swizzle, promotion, fill);
  memset(map, 7, 128);
  map[0] = (uintptr_t)address;
  return 0;
}

API cuPointerGetAttribute(void *value, int attribute, uint64_t address) {
  if (attribute != 9) return 1;
  *(int *)value = (int)(address >> 40);
  return 0;
}

API cuGetErrorName(int status, const char **text) { *text = "CUDA_ERROR_STUB"; return 0; }
API cuGetErrorString(int status, const char **text) { *text = "text of the stub"; return 0; }

API cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
  Dl_info here;
  dladdr((void *)cuInit, &here);
  *function = dlsym(dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD), name);
  if (status) *status = *function ? 0 : 1;
  return *function ? 0 : 500;
}
