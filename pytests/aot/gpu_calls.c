/* Makes calls for two GPUs at once, on the driver of fake_cuda.c: of each GPU from two threads with streams of their own,
 * one that has no context, and one whose context is the other GPU's.
 *
 *     gpu_calls FOLDER CALLS ROWS_OF_X M ...        CALLS for each M in each thread; ROWS_OF_X 0: M
 *
 * A call must leave the thread's context as it was, and take no memory: functions that allocate are wrapped
 * (-Wl,--wrap=malloc ...) and end the process while calls are made, as the driver's do. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lowbit.h"

enum { GPUS = 2, THREADS = 4, MOST = 40, ARRAY = 1 << 12 };

static lowbit_matmul *handle[GPUS];
static void *weight[GPUS][MOST], *context[GPUS], *workspace[THREADS];
static atomic_int *serves;
static pthread_barrier_t ready, done;
static int (*get_current)(void **), (*push)(void *);
static int calls, numbers;
static int64_t rows_of_x, rows[MOST], workspace_bytes;

static void must(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "%s: %s\n", what, lowbit_error_text());
    abort();
}

#define WRAP(returned, function, parameters, arguments)                                                                \
    returned __real_##function parameters;                                                                             \
    returned __wrap_##function parameters;                                                                             \
    returned __wrap_##function parameters {                                                                            \
        must(!serves || !*serves, #function " in a call");                                                             \
        return __real_##function arguments;                                                                            \
    }
WRAP(void *, malloc, (size_t bytes), (bytes))
WRAP(void *, calloc, (size_t count, size_t bytes), (count, bytes))
WRAP(void *, realloc, (void *memory, size_t bytes), (memory, bytes))
WRAP(void *, aligned_alloc, (size_t align, size_t bytes), (align, bytes))

/* A call that is wrong gives this thread's text, whatever others do. */
static void check_text(int thread) {
    char expected[32];
    lowbit_call wrong = {.size = sizeof wrong, .m = -1 - thread};
    snprintf(expected, sizeof expected, "m=%d must be", -1 - thread);
    must(lowbit_run(handle[thread % GPUS], &wrong) == LOWBIT_BAD_ARGUMENT, "a wrong call");
    must(!strncmp(lowbit_error_text(), expected, strlen(expected)), "the text of a wrong call");
}

static void make_calls(int thread, void *expected) {
    int gpu = thread % GPUS;
    char *arrays = workspace[thread], *inputs[MOST];
    for (int i = 0; i < MOST; i++) inputs[i] = arrays + 2 * ARRAY;
    lowbit_call call = {.size = sizeof call, .x = arrays, .y = arrays + ARRAY, .x_rows = rows_of_x};
    call.weight = (const void *const *)weight[gpu], call.inputs = (const void *const *)inputs;
    call.workspace = arrays, call.workspace_bytes = workspace_bytes, call.stream = arrays;
    for (int i = 0; i < calls; i++)
        for (int r = 0; r < numbers; r++) {
            void *current = NULL;
            call.m = rows[r];
            must(!lowbit_run(handle[gpu], &call), "a call");
            must(!get_current(&current) && current == expected, "the context after a call");
            check_text(thread);
        }
}

static void *work(void *argument) {
    int thread = (int)(intptr_t)argument;
    void *of_other = thread < GPUS ? NULL : context[(thread + 1) % GPUS];
    if (of_other) push(of_other);
    pthread_barrier_wait(&ready);
    make_calls(thread, of_other);
    pthread_barrier_wait(&done);
    return NULL;
}

static void open_all(const char *folder) {
    for (int gpu = 0; gpu < GPUS; gpu++) {
        must(!lowbit_open(folder, NULL, gpu, &handle[gpu]), "lowbit_open");
        for (int i = 0; i < lowbit_tensors(handle[gpu]); i++)
            must(!lowbit_allocate(handle[gpu], lowbit_tensor_bytes(handle[gpu], i), &weight[gpu][i]), "a tensor");
        for (int r = 0; r < numbers; r++) {
            int64_t m = rows[r] > rows_of_x ? rows[r] : rows_of_x, bytes = lowbit_workspace_bytes(handle[gpu], m);
            workspace_bytes = bytes > workspace_bytes ? bytes : workspace_bytes;
        }
    }
    if (workspace_bytes < 3 * ARRAY) workspace_bytes = 3 * ARRAY; /* the other arrays of a call are there, too */
}

static void close_all(void) {
    for (int gpu = 0; gpu < GPUS; gpu++) {
        for (int i = 0; i < lowbit_tensors(handle[gpu]); i++) lowbit_free(handle[gpu], weight[gpu][i]);
        for (int thread = gpu; thread < THREADS; thread += GPUS) lowbit_free(handle[gpu], workspace[thread]);
        lowbit_close(handle[gpu]);
    }
}

int main(int count, char **given) {
    pthread_t threads[THREADS];
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    must(driver && count > 4 && count - 4 <= MOST, "no driver, or no folder, calls, rows of x and m");
    calls = atoi(given[2]), rows_of_x = atoll(given[3]);
    for (int i = 4; i < count; i++) rows[numbers++] = atoll(given[i]);
    int (*retain)(void **, int) = (int (*)(void **, int))(intptr_t)dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*release)(int) = (int (*)(int))(intptr_t)dlsym(driver, "cuDevicePrimaryCtxRelease_v2");
    get_current = (int (*)(void **))(intptr_t)dlsym(driver, "cuCtxGetCurrent");
    push = (int (*)(void *))(intptr_t)dlsym(driver, "cuCtxPushCurrent_v2");
    for (int gpu = 0; gpu < GPUS; gpu++) retain(&context[gpu], gpu);
    open_all(given[1]);
    pthread_barrier_init(&ready, NULL, THREADS + 1), pthread_barrier_init(&done, NULL, THREADS + 1);
    for (intptr_t i = 0; i < THREADS; i++) {
        must(!lowbit_allocate(handle[i % GPUS], workspace_bytes, &workspace[i]), "a workspace");
        pthread_create(&threads[i], NULL, work, (void *)i);
    }
    serves = dlsym(driver, "fake_cuda_serves");
    *serves = 1;
    pthread_barrier_wait(&ready), pthread_barrier_wait(&done);
    *serves = 0;
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    printf("%s and %s: %d calls\n", lowbit_target(handle[0]), lowbit_target(handle[1]), THREADS * calls * numbers);
    close_all();
    for (int gpu = 0; gpu < GPUS; gpu++) release(gpu);
    return 0;
}
