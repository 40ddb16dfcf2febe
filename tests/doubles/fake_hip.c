/* A libamdhip64.so.6 that does nothing, whose exports call each other as the real one's do once there is a device:
 * hipMemcpyPeer is a hipMemcpy, which here is a hipMemcpyAsync and a hipStreamSynchronize; a launch is a module launch.
 * Addresses as in fake_cuda.c. A failing call becomes the thread's last error.
 */
static _Thread_local int last_error;
static int done(int error) { return error ? (last_error = error) : 0; }

int hipGetLastError(void) {
    int error = last_error;
    last_error = 0;
    return error;
}
int hipPeekAtLastError(void) { return last_error; }
int hipPointerGetAttribute(void *data, int attribute, unsigned long pointer) {
    if (attribute != 2) return done(1);
    if (pointer >= 0x1000 && pointer < 0x2000) return *(unsigned *)data = 2, done(0);
    if (pointer >= 0x2000 && pointer < 0x3000) return *(unsigned *)data = 1, done(0);
    return done(1);
}
static int capturing;
int hipStreamIsCapturing(void *stream, int *status) { return *status = stream ? capturing : 0, done(0); }
int hipStreamBeginCapture(void *stream, int mode) { return (void)stream, (void)mode, capturing = 1, done(0); }
int hipStreamEndCapture(void *stream, void **graph) { return (void)stream, (void)graph, capturing = 0, done(0); }

int hipStreamSynchronize(void *stream) { return (void)stream, done(0); }
int hipEventSynchronize(void *event) { return done(event ? 0 : 9); }
int hipDeviceSynchronize(void) { return done(0); }
int hipMemcpyAsync(void *to, const void *from, unsigned long n, int kind, void *stream) {
    return (void)to, (void)from, (void)n, (void)kind, (void)stream, done(0);
}
int hipMemcpyWithStream(void *to, const void *from, unsigned long n, int kind, void *stream) {
    hipMemcpyAsync(to, from, n, kind, stream);
    return hipStreamSynchronize(stream);
}
int hipMemcpy(void *to, const void *from, unsigned long n, int kind) {
    hipMemcpyAsync(to, from, n, kind, 0);
    return hipStreamSynchronize(0);
}
int hipMemcpyPeer(void *to, int there, const void *from, int here, unsigned long n) {
    return (void)there, (void)here, hipMemcpy(to, from, n, 3);
}
typedef struct { unsigned x, y, z; } Dim;
int hipModuleLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned shared,
                          void *stream, void **arguments, void **extra) {
    return (void)f, (void)stream, (void)arguments, (void)extra, done(a + b + c + d + e + g + shared == 28 ? 0 : 1);
}
int hipLaunchKernel(const void *f, Dim grid, Dim block, void **arguments, unsigned long shared, void *stream) {
    return hipModuleLaunchKernel((void *)f, grid.x, grid.y, grid.z, block.x, block.y, block.z, (unsigned)shared, stream,
                                 arguments, 0);
}
int hipFree(void *p) { return (void)p, done(0); }
int hipMemset3D(void) { return done(0); }
