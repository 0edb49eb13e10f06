// What FlashInfer's planners call of the CUDA runtime, for a machine without a device: an H200 that
// holds one block of threads on each multiprocessor, whose memory is the host's.
#include <stddef.h>
#include <string.h>

enum { MULTIPROCESSORS = 16, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };

int cudaGetDevice(int *device) {
    *device = 0;
    return 0;
}

int cudaSetDevice(int device) {
    (void)device;
    return 0;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == MULTIPROCESSORS    ? 132
             : attribute == CAPABILITY_MAJOR ? 9
             : attribute == CAPABILITY_MINOR ? 0
                                             : 233472; // bytes of shared memory
    return 0;
}

int cudaFuncSetAttribute(const void *function, int attribute, int value) {
    (void)function, (void)attribute, (void)value;
    return 0;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                           int threads, size_t shared, unsigned flags) {
    (void)function, (void)threads, (void)shared, (void)flags;
    *blocks = 1;
    return 0;
}

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    (void)kind, (void)stream;
    memcpy(to, from, bytes);
    return 0;
}

int cudaGetLastError(void) {
    return 0;
}
