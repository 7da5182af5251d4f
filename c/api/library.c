/* The functions of <pccl.h>: they start Python, and pass calls on to pccl.capi.calls.
 *
 * This file is a part of the extension module pccl.capi.libpccl, which programs link as a library.
 * pcclInit() starts an interpreter if the process has none, and imports pccl.capi.calls, which
 * implements the functions of library.h; it finds the module loaded already, as the program links
 * it. All calls go to these functions; cffi takes the interpreter's lock for them, in any thread.
 *
 * Python exceptions do not leave this file; functions return a result instead. */

#include <Python.h> /* must be first: it decides which system functions are declared */

#include "library.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

#if defined(_WIN32)
#include <windows.h>
#define TAKE(lock) (InterlockedExchange(&(lock), 1) != 0)
#define RELEASE(lock) InterlockedExchange(&(lock), 0)
#define PAUSE() Sleep(1)
static volatile LONG starting; /* a thread is in start() */
#else
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#define TAKE(lock) __sync_lock_test_and_set(&(lock), 1)
#define RELEASE(lock) __sync_lock_release(&(lock))
#define PAUSE() sched_yield()
static volatile int starting;
#endif

static volatile int implemented; /* pccl.capi.calls is imported */
static volatile int initialized; /* pcclInit() has succeeded */
static volatile int forked;      /* this is a child of the process that has started Python */

/* A forked child has only one thread, so nothing releases the locks that other threads held. */
static const char FORKED[] = "this process was forked from the one that uses pccl, and cannot use "
                             "it: call exec, or fork before pcclInit()";

#if !defined(_WIN32)
static void note_fork(void)
{
    forked = 1;
}
#endif

void pccl_capi_implement(void)
{
    implemented = 1;
}

/* The directory that holds the package of this library, HOME/pccl/capi/libpccl.so; or "". */
static void find_home(char *home, size_t size)
{
    home[0] = '\0';
#if !defined(_WIN32)
    Dl_info found;
    int levels;
    if (!dladdr((void *)&starting, &found) || strlen(found.dli_fname) >= size)
        return;
    strcpy(home, found.dli_fname);
    for (levels = 0; levels < 3; levels++) {
        char *last = strrchr(home, '/');
        if (!last)
            last = home;
        *last = '\0';
    }
#else
    (void)size;
#endif
}

/* Lets Python find the package, and packages beside it. Returns 0 on failure. */
static int look_in(const char *home)
{
    PyObject *path = PySys_GetObject("path"); /* borrowed */
    PyObject *text = PyUnicode_DecodeFSDefault(home);
    PyObject *site = NULL, *done = NULL;
    if (path && text && PyList_Insert(path, 0, text) == 0)
        site = PyImport_ImportModule("site");
    if (site)
        done = PyObject_CallMethod(site, "addsitedir", "O", text); /* reads its .pth files */
    Py_XDECREF(done);
    Py_XDECREF(site);
    Py_XDECREF(text);
    return done != NULL;
}

/* Imports the implementation of the calls. Returns 0 on failure; stderr says why. */
static int import_calls(int fresh)
{
    char home[4096];
    PyObject *calls = NULL;
    find_home(home, sizeof home);
    if (!fresh || !home[0] || look_in(home))
        calls = PyImport_ImportModule("pccl.capi.calls");
    if (!calls) {
        fprintf(stderr, "pccl: Python cannot import the package pccl, looking in %s first:\n",
                home[0] ? home : "its own path");
        PyErr_Print();
        return 0;
    }
    Py_DECREF(calls);
    if (!implemented)
        fprintf(stderr, "pccl: this library, of %s, does not belong to the package that Python has "
                        "imported: link it as `pccl libs` says, and do not copy it\n",
                home);
    return implemented;
}

#if defined(_WIN32)
typedef void (*handler)(int);
static void get_interrupt(handler *found)
{
    *found = signal(SIGINT, SIG_DFL);
    signal(SIGINT, *found);
}
static void set_interrupt(const handler *wanted)
{
    signal(SIGINT, *wanted);
}
#else
typedef struct sigaction handler;
static void get_interrupt(handler *found)
{
    sigaction(SIGINT, NULL, found);
}
static void set_interrupt(const handler *wanted)
{
    sigaction(SIGINT, wanted, NULL);
}
#endif

/* Starts Python and imports the implementation, if necessary. Returns whether calls can be made. */
static int start(void)
{
    if (forked)
        return 0;
    while (TAKE(starting))
        PAUSE();
    if (!implemented) {
        int fresh = !Py_IsInitialized();
        PyGILState_STATE state;
        handler interrupt;
        get_interrupt(&interrupt);
        if (fresh) {
            Py_InitializeEx(0); /* without signal handlers: those are the program's */
            PyEval_SaveThread();
#if !defined(_WIN32)
            pthread_atfork(NULL, NULL, note_fork); /* Python itself notices only os.fork() */
#endif
        }
        state = PyGILState_Ensure();
        import_calls(fresh);
        PyGILState_Release(state);
        if (fresh)
            set_interrupt(&interrupt); /* importing Python's module `signal` has replaced it */
    }
    RELEASE(starting);
    return implemented;
}

pcclResult_t pcclInit(void)
{
    if (!start())
        return forked ? pcclInvalidUsage : pcclInternalError;
    initialized = 1;
    return pcclSuccess;
}

pcclResult_t pcclGetBuildInfo(pcclBuildInfo_t *info_out)
{
    if (!start())
        return forked ? pcclInvalidUsage : pcclInternalError;
    return (pcclResult_t)pccl_capi_build_info(info_out);
}

const char *pcclGetLastError(void)
{
    if (forked)
        return FORKED;
    return implemented ? pccl_capi_last_error() : "";
}

/* The other functions only pass the call on. */

#define PASS_ON(call) \
    return forked ? pcclInvalidUsage : initialized ? (pcclResult_t)(call) : pcclNotInitialized

pcclResult_t pcclCreateCommunicator(const pcclCommCreateParams_t *params, pcclComm_t **comm_out)
{
    PASS_ON(pccl_capi_create_communicator(params, comm_out));
}

pcclResult_t pcclConnect(pcclComm_t *comm)
{
    PASS_ON(pccl_capi_connect(comm));
}

pcclResult_t pcclDestroyCommunicator(pcclComm_t *comm)
{
    PASS_ON(pccl_capi_destroy_communicator(comm));
}

pcclResult_t pcclGetAttribute(const pcclComm_t *comm, pcclAttribute_t attribute, int *value_out)
{
    PASS_ON(pccl_capi_get_attribute(comm, (int)attribute, value_out));
}

pcclResult_t pcclUpdateTopology(pcclComm_t *comm)
{
    PASS_ON(pccl_capi_update_topology(comm));
}

pcclResult_t pcclArePeersPending(const pcclComm_t *comm, bool *pending_out)
{
    PASS_ON(pccl_capi_are_peers_pending(comm, pending_out));
}

pcclResult_t pcclOptimizeTopology(const pcclComm_t *comm)
{
    PASS_ON(pccl_capi_optimize_topology(comm));
}

pcclResult_t pcclAllReduce(const void *sendbuf, void *recvbuf,
                           const pcclReduceDescriptor_t *descriptor, const pcclComm_t *comm,
                           pcclReduceInfo_t *info_out)
{
    PASS_ON(pccl_capi_all_reduce(sendbuf, recvbuf, descriptor, comm, info_out));
}

pcclResult_t pcclAllReduceAsync(const void *sendbuf, void *recvbuf,
                                const pcclReduceDescriptor_t *descriptor, const pcclComm_t *comm,
                                pcclAsyncReduceOp_t *reduce_handle_out)
{
    PASS_ON(pccl_capi_all_reduce_async(sendbuf, recvbuf, descriptor, comm, reduce_handle_out));
}

pcclResult_t pcclAwaitAsyncReduce(const pcclAsyncReduceOp_t *reduce_handle,
                                  pcclReduceInfo_t *info_out)
{
    PASS_ON(pccl_capi_await_async_reduce(reduce_handle, info_out));
}

pcclResult_t pcclAllReduceMultipleWithRetry(const pcclReduceOpDescriptor_t *descriptors,
                                            size_t count, const pcclComm_t *comm,
                                            pcclReduceInfo_t *info_out, int max_in_flight)
{
    PASS_ON(pccl_capi_all_reduce_multiple(descriptors, count, comm, info_out, max_in_flight));
}

pcclResult_t pcclSynchronizeSharedState(const pcclComm_t *comm, pcclSharedState_t *shared_state,
                                        pcclSharedStateSyncStrategy_t strategy,
                                        pcclSharedStateSyncInfo_t *info_out)
{
    PASS_ON(pccl_capi_synchronize(comm, shared_state, (int)strategy, info_out));
}

pcclResult_t pcclCreateMaster(ccoip_socket_address_t listen_address,
                              pcclMasterInstance_t **master_out)
{
    PASS_ON(pccl_capi_create_master(&listen_address, master_out));
}

pcclResult_t pcclRunMaster(pcclMasterInstance_t *master)
{
    PASS_ON(pccl_capi_run_master(master));
}

pcclResult_t pcclInterruptMaster(pcclMasterInstance_t *master)
{
    PASS_ON(pccl_capi_interrupt_master(master));
}

pcclResult_t pcclMasterAwaitTermination(pcclMasterInstance_t *master)
{
    PASS_ON(pccl_capi_await_master(master));
}

pcclResult_t pcclDestroyMaster(pcclMasterInstance_t *master)
{
    PASS_ON(pccl_capi_destroy_master(master));
}
