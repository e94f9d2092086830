/* A libcuda.so.1 that does nothing, so that Triton's own launcher can be timed on a machine without a GPU. */
#include <stddef.h>
#include <stdint.h>

enum { MAX_THREADS = 1024, SHARED = 232448, FUNCTION_MAX_THREADS = 0 };

int cuGetErrorString(int code, const char **text) { *text = "nothing"; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  /* 75, 76: the compute capability; 97, 81: shared memory of a program, on request and without. */
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 97 ? SHARED : attribute == 81 ? 49152 : 32;
  return 0;
}
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetLimit(size_t *value, int limit) { *value = 1; return 0; }
int cuCtxSetLimit(int limit, size_t value) { return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = module; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == FUNCTION_MAX_THREADS ? MAX_THREADS : 32;
  return 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuOccupancyMaxActiveClusters(int *clusters, void *function, void *config) { *clusters = 1; return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
int cuTensorMapEncodeIm2col(void) { return 0; }
int cuPointerGetAttribute(void *data, int attribute, uint64_t pointer) { *(uint64_t *)data = pointer; return 0; }
int cuLaunchKernelEx(void *config, void *function, void **parameters, void **extra) { return 0; }
