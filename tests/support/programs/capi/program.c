/* A C program that uses all of <pccl.h>, valid in C99 and in C++17; test_c_api.py runs its modes.
 *
 *     program misuse PORT        nothing listens at PORT
 *     program peer PORT          a peer of Python, at the same master, does the same
 *     program master PORT        serves at PORT, alone
 *     program leave PORT         ends without destroying anything
 *     program fork PORT          joins the master, and forks
 *     program build              says whether GPUs are supported
 *
 * It says which checks fail, and ends with how many. */

#include <pccl.h>

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define COUNT 50000
#define THREADS 4

static int failures;

static void check(int ok, int line, const char *what)
{
    if (!ok) {
        failures++;
        printf("line %d: %s; last error: %s\n", line, what, pcclGetLastError());
    }
}

#define CHECK(what) check(what, __LINE__, #what)
#define ENDS(call, with) check_result(call, with, __LINE__, #call)

static void check_result(pcclResult_t found, pcclResult_t wanted, int line, const char *what)
{
    if (found != wanted) {
        printf("%d and not %d: ", (int)found, (int)wanted);
        check(0, line, what);
    }
}

/* Whether the last failure of this thread was told in words that have these among them. */
static int told(const char *words)
{
    return strstr(pcclGetLastError(), words) != NULL;
}

static ccoip_socket_address_t at(int port)
{
    ccoip_socket_address_t address;
    memset(&address, 0, sizeof address);
    address.inet.protocol = inetIPv4;
    address.inet.ipv4.data[0] = 127;
    address.inet.ipv4.data[3] = 1;
    address.port = (uint16_t)port;
    return address;
}

static pcclReduceDescriptor_t sum_of(size_t count, uint64_t tag)
{
    pcclReduceDescriptor_t work;
    memset(&work, 0, sizeof work);
    work.count = count;
    work.op = pcclSum;
    work.tag = tag;
    work.src_descriptor.datatype = pcclFloat;
    return work;
}

static pcclComm_t *created(int port)
{
    pcclCommCreateParams_t params;
    pcclComm_t *comm = NULL;
    memset(&params, 0, sizeof params);
    params.master_address = at(port);
    ENDS(pcclCreateCommunicator(&params, &comm), pcclSuccess);
    return comm;
}

/* ---- misuse ---- */

static void before_init(void)
{
    pcclReduceDescriptor_t work = sum_of(1, 0);
    pcclReduceOpDescriptor_t op;
    pcclSharedState_t state;
    pcclAsyncReduceOp_t launched;
    pcclCommCreateParams_t params;
    pcclMasterInstance_t *master = NULL;
    pcclComm_t *comm = NULL;
    float x = 1.0f;
    int value;
    bool pending;
    memset(&op, 0, sizeof op);
    memset(&state, 0, sizeof state);
    memset(&launched, 0, sizeof launched);
    memset(&params, 0, sizeof params);

    CHECK(strcmp(pcclGetLastError(), "") == 0);
    ENDS(pcclCreateCommunicator(&params, &comm), pcclNotInitialized);
    ENDS(pcclConnect(comm), pcclNotInitialized);
    ENDS(pcclDestroyCommunicator(comm), pcclNotInitialized);
    ENDS(pcclGetAttribute(comm, PCCL_ATTRIBUTE_GLOBAL_WORLD_SIZE, &value), pcclNotInitialized);
    ENDS(pcclUpdateTopology(comm), pcclNotInitialized);
    ENDS(pcclArePeersPending(comm, &pending), pcclNotInitialized);
    ENDS(pcclOptimizeTopology(comm), pcclNotInitialized);
    ENDS(pcclAllReduce(&x, &x, &work, comm, NULL), pcclNotInitialized);
    ENDS(pcclAllReduceAsync(&x, &x, &work, comm, &launched), pcclNotInitialized);
    ENDS(pcclAwaitAsyncReduce(&launched, NULL), pcclNotInitialized);
    ENDS(pcclAllReduceMultipleWithRetry(&op, 1, comm, NULL, 1), pcclNotInitialized);
    ENDS(pcclSynchronizeSharedState(comm, &state, PCCL_SHARED_STATE_SYNC_STRATEGY_SEND_ONLY, NULL),
         pcclNotInitialized);
    ENDS(pcclCreateMaster(params.master_address, &master), pcclNotInitialized);
    ENDS(pcclRunMaster(master), pcclNotInitialized);
    ENDS(pcclInterruptMaster(master), pcclNotInitialized);
    ENDS(pcclMasterAwaitTermination(master), pcclNotInitialized);
    ENDS(pcclDestroyMaster(master), pcclNotInitialized);
}

static void wrong_handles(pcclComm_t *comm, pcclMasterInstance_t *master)
{
    pcclReduceDescriptor_t work = sum_of(1, 0);
    pcclAsyncReduceOp_t launched;
    float x = 1.0f;
    bool pending;

    ENDS(pcclConnect(NULL), pcclInvalidArgument);
    CHECK(told("pcclConnect: a communicator is NULL"));
    ENDS(pcclConnect((pcclComm_t *)&x), pcclInvalidArgument);
    CHECK(told("is not a communicator, or it was destroyed"));
    ENDS(pcclRunMaster((pcclMasterInstance_t *)comm), pcclInvalidArgument);
    ENDS(pcclUpdateTopology((pcclComm_t *)master), pcclInvalidArgument);
    ENDS(pcclArePeersPending(NULL, &pending), pcclInvalidArgument);
    ENDS(pcclAllReduce(&x, &x, &work, NULL, NULL), pcclInvalidArgument);
    launched.comm = comm;
    launched.tag = 9;
    ENDS(pcclAwaitAsyncReduce(&launched, NULL), pcclInvalidArgument);
    CHECK(told("no all-reduce with tag 9 was launched"));
    ENDS(pcclDestroyMaster(NULL), pcclInvalidArgument);
}

static void wrong_arguments(pcclComm_t *comm)
{
    pcclReduceDescriptor_t work = sum_of(4, 0);
    pcclReduceOpDescriptor_t op;
    pcclTensorInfo_t info;
    pcclSharedState_t state;
    pcclCommCreateParams_t params;
    pcclComm_t *made;
    float x[8] = {0};

    ENDS(pcclCreateCommunicator(NULL, &made), pcclInvalidArgument);
    memset(&params, 0, sizeof params);
    ENDS(pcclCreateCommunicator(&params, NULL), pcclInvalidArgument);
    params.p2p_connection_pool_size = 1u << 31;
    ENDS(pcclCreateCommunicator(&params, &made), pcclInvalidArgument);
    params.master_address.inet.protocol = (ccoip_inet_protocol_t)7;
    ENDS(pcclCreateCommunicator(&params, &made), pcclInvalidArgument);
    CHECK(told("inet.protocol is 7"));
    ENDS(pcclGetAttribute(comm, (pcclAttribute_t)77, (int *)x), pcclInvalidArgument);
    CHECK(told("attribute is 77"));
    ENDS(pcclGetAttribute(comm, PCCL_ATTRIBUTE_GLOBAL_WORLD_SIZE, NULL), pcclInvalidArgument);
    ENDS(pcclArePeersPending(comm, NULL), pcclInvalidArgument);
    ENDS(pcclAllReduce(x, x, NULL, comm, NULL), pcclInvalidArgument);
    ENDS(pcclAllReduce(NULL, x, &work, comm, NULL), pcclInvalidArgument);
    CHECK(told("sendbuf is NULL"));
    ENDS(pcclAllReduce(x, x + 1, &work, comm, NULL), pcclInvalidArgument);
    CHECK(told("overlap"));
    ENDS(pcclAllReduceAsync(x, x, &work, comm, NULL), pcclInvalidArgument);
    work.op = (pcclRedOp_t)9;
    ENDS(pcclAllReduce(x, x, &work, comm, NULL), pcclInvalidArgument);
    CHECK(told("op is 9: it may be 0 (SUM)"));
    work = sum_of(4, 0);
    work.src_descriptor.datatype = (pcclDataType_t)12;
    ENDS(pcclAllReduce(x, x, &work, comm, NULL), pcclInvalidArgument);
    ENDS(pcclAllReduceMultipleWithRetry(NULL, 1, comm, NULL, 1), pcclInvalidArgument);
    ENDS(pcclAllReduceMultipleWithRetry(NULL, 0, comm, NULL, 1), pcclInvalidArgument);
    memset(&op, 0, sizeof op);
    op.sendbuf = op.recvbuf = x;
    op.descriptor = sum_of(4, 0);
    ENDS(pcclAllReduceMultipleWithRetry(&op, 1, comm, NULL, 0), pcclInvalidArgument);

    memset(&state, 0, sizeof state);
    memset(&info, 0, sizeof info);
#define SYNC(state) \
    pcclSynchronizeSharedState(comm, state, PCCL_SHARED_STATE_SYNC_STRATEGY_ENFORCE_POPULAR, NULL)
    ENDS(SYNC(NULL), pcclInvalidArgument);
    ENDS(SYNC(&state), pcclInvalidArgument);
    state.count = 1;
    ENDS(SYNC(&state), pcclInvalidArgument);
    state.infos = &info;
    ENDS(SYNC(&state), pcclInvalidArgument);
    CHECK(told("infos[0].name is NULL"));
    info.name = "x";
    info.count = 4;
    ENDS(SYNC(&state), pcclInvalidArgument); /* at NULL */
    info.data = x;
    info.datatype = pcclFloat;
    ENDS(SYNC(&state), pcclInvalidUsage); /* not connected */
    info.count = (size_t)-1;
    ENDS(SYNC(&state), pcclInvalidArgument);
    info.count = (size_t)1 << 60;
    ENDS(SYNC(&state), pcclInvalidArgument);
    CHECK(told("no memory has so many elements"));
    info.count = 4;
    ENDS(pcclSynchronizeSharedState(comm, &state, (pcclSharedStateSyncStrategy_t)3, NULL),
         pcclInvalidArgument);
}

static void *elsewhere(void *comm)
{
    CHECK(strcmp(pcclGetLastError(), "") == 0); /* of other threads */
    ENDS(pcclUpdateTopology((pcclComm_t *)comm), pcclInvalidUsage);
    CHECK(told("pcclUpdateTopology: ")); /* of the call before: the thread is known again */
    return NULL;
}

static void misuse(int port)
{
    pcclMasterInstance_t *master = NULL;
    pcclReduceDescriptor_t work = sum_of(1, 0);
    pthread_t thread;
    pcclComm_t *comm;
    float x = 1.0f;

    before_init();
    ENDS(pcclGetBuildInfo(NULL), pcclInvalidArgument);
    CHECK(told("pcclGetBuildInfo: info_out is NULL"));
    ENDS(pcclUpdateTopology(NULL), pcclNotInitialized); /* although Python runs */
    ENDS(pcclInit(), pcclSuccess);
    ENDS(pcclInit(), pcclSuccess);
    comm = created(port);
    ENDS(pcclCreateMaster(at(0), NULL), pcclInvalidArgument);
    ENDS(pcclCreateMaster(at(0), &master), pcclSuccess);
    wrong_handles(comm, master);
    wrong_arguments(comm);
    ENDS(pcclAllReduce(&x, &x, &work, comm, NULL), pcclInvalidUsage); /* not connected */
    CHECK(pthread_create(&thread, NULL, elsewhere, comm) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    ENDS(pcclConnect(comm), pcclMasterConnectionFailed);
    ENDS(pcclInterruptMaster(master), pcclInvalidUsage);
    ENDS(pcclMasterAwaitTermination(master), pcclInvalidUsage);
    ENDS(pcclDestroyMaster(master), pcclSuccess);
    ENDS(pcclDestroyMaster(master), pcclInvalidArgument);
    ENDS(pcclDestroyCommunicator(comm), pcclSuccess);
    ENDS(pcclDestroyCommunicator(comm), pcclInvalidArgument);
    ENDS(pcclConnect(comm), pcclInvalidArgument);
}

/* ---- a run ---- */

static void wait_for(pcclComm_t *comm, int wanted)
{
    int peers = 0;
    bool pending = false;
    while (!failures) {
        ENDS(pcclGetAttribute(comm, PCCL_ATTRIBUTE_PEER_GROUP_WORLD_SIZE, &peers), pcclSuccess);
        if (peers >= wanted)
            return;
        ENDS(pcclArePeersPending(comm, &pending), pcclSuccess);
        if (pending)
            ENDS(pcclUpdateTopology(comm), pcclSuccess);
    }
}

struct share {
    pcclComm_t *comm;
    uint64_t tag;
};

/* One collective in a thread of its own: the other peer gives tag times as much. */
static void *add_up(void *given)
{
    const struct share *share = (const struct share *)given;
    pcclReduceDescriptor_t work = sum_of(COUNT, share->tag);
    pcclReduceInfo_t info;
    float *x = (float *)malloc(2 * COUNT * sizeof *x);
    int i;
    for (i = 0; x && i < COUNT; i++)
        x[i] = 1.0f;
    ENDS(pcclAllReduce(x, x + COUNT, &work, share->comm, &info), pcclSuccess);
    CHECK(info.local_world_size == 2 && info.tx_bytes > 0 && info.rx_bytes > 0);
    CHECK(x[0] == 1.0f && x[COUNT] == 1.0f + (float)share->tag);
    CHECK(x[2 * COUNT - 1] == 1.0f + (float)share->tag);
    free(x);
    return NULL;
}

static void in_threads(pcclComm_t *comm)
{
    pthread_t threads[THREADS];
    struct share shares[THREADS];
    int i;
    for (i = 0; i < THREADS; i++) {
        shares[i].comm = comm;
        shares[i].tag = (uint64_t)(i + 1);
        CHECK(pthread_create(&threads[i], NULL, add_up, &shares[i]) == 0);
    }
    for (i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

static void launched(pcclComm_t *comm)
{
    pcclReduceDescriptor_t work = sum_of(3, 11);
    pcclReduceOpDescriptor_t ops[2];
    pcclAsyncReduceOp_t op, again;
    pcclReduceInfo_t info;
    uint16_t half[2] = {0x3f80, 0x4000}; /* 1 and 2, of bfloat16 */
    float x[3] = {1, 2, 3}, y[3], z[3] = {4, 5, 6};

    work.op = pcclAvg;
    ENDS(pcclAllReduceAsync(x, y, &work, comm, &op), pcclSuccess);
    ENDS(pcclAllReduceAsync(x, z, &work, comm, &again), pcclInvalidArgument); /* the tag */
    ENDS(pcclUpdateTopology(comm), pcclPendingAsyncOps);
    ENDS(pcclAwaitAsyncReduce(&op, &info), pcclSuccess);
    CHECK(info.local_world_size == 2 && x[2] == 3 && y[0] == 1 && y[1] == 2 && y[2] == 3);
    ENDS(pcclAwaitAsyncReduce(&op, &info), pcclInvalidArgument);

    memset(ops, 0, sizeof ops);
    ops[0].sendbuf = ops[0].recvbuf = z;
    ops[0].descriptor = sum_of(3, 1);
    ops[1].sendbuf = ops[1].recvbuf = half;
    ops[1].descriptor = sum_of(2, 2);
    ops[1].descriptor.src_descriptor.datatype = pcclBFloat16;
    ENDS(pcclAllReduceMultipleWithRetry(ops, 2, comm, NULL, 2), pcclSuccess);
    CHECK(z[0] == 8 && z[1] == 10 && z[2] == 12 && half[0] == 0x4000 && half[1] == 0x4080);

    work = sum_of(3, 0);
    work.quantization_options.algorithm = pcclQuantBlockwiseInt8;
    x[0] = x[1] = x[2] = 2;
    ENDS(pcclAllReduce(x, x, &work, comm, NULL), pcclSuccess);
    CHECK(x[0] == 4 && x[2] == 4);
    work.src_descriptor.datatype = pcclInt32; /* which cannot be quantized */
    ENDS(pcclAllReduce(x, x, &work, comm, NULL), pcclInvalidArgument);
}

static void shared_state(pcclComm_t *comm)
{
    double weights[3] = {0, 0, 0};
    int64_t step = 0;
    pcclTensorInfo_t infos[2];
    pcclSharedState_t state;
    pcclSharedStateSyncInfo_t info;
    memset(infos, 0, sizeof infos);
    infos[0].name = "weights";
    infos[0].data = weights;
    infos[0].count = 3;
    infos[0].datatype = pcclDouble;
    infos[1].name = "step";
    infos[1].data = &step;
    infos[1].count = 1;
    infos[1].datatype = pcclInt64;
    state.revision = 0;
    state.count = 2;
    state.infos = infos;
    ENDS(pcclSynchronizeSharedState(comm, &state, PCCL_SHARED_STATE_SYNC_STRATEGY_ENFORCE_POPULAR,
                                    &info),
         pcclSuccess);
    CHECK(state.revision == 7 && info.rx_bytes == 32 && info.tx_bytes == 0);
    CHECK(weights[0] == 1 && weights[2] == 3 && step == 42);
}

/* It leaves while this peer waits for it: memory holds what it held, and this one goes on. */
static void lose_the_other(pcclComm_t *comm)
{
    pcclReduceDescriptor_t work = sum_of(3, 77);
    float x[3] = {1, 2, 3};
    int peers = 0;
    ENDS(pcclAllReduce(x, x, &work, comm, NULL), pcclRankConnectionLost);
    CHECK(told("call again"));
    CHECK(x[0] == 1 && x[1] == 2 && x[2] == 3);
    ENDS(pcclAllReduce(x, x, &work, comm, NULL), pcclTooFewPeers);
    ENDS(pcclGetAttribute(comm, PCCL_ATTRIBUTE_GLOBAL_WORLD_SIZE, &peers), pcclSuccess);
    CHECK(peers == 1);
}

static void peer(int port)
{
    pcclComm_t *comm;
    int value = 0;
    ENDS(pcclInit(), pcclSuccess);
    comm = created(port);
    ENDS(pcclConnect(comm), pcclSuccess);
    ENDS(pcclConnect(comm), pcclInvalidUsage);
    wait_for(comm, 2);
    if (failures)
        return;
    ENDS(pcclGetAttribute(comm, PCCL_ATTRIBUTE_NUM_DISTINCT_PEER_GROUPS, &value), pcclSuccess);
    CHECK(value == 1);
    in_threads(comm);
    launched(comm);
    shared_state(comm);
    lose_the_other(comm);
    ENDS(pcclDestroyCommunicator(comm), pcclSuccess);
}

static void *await(void *master)
{
    ENDS(pcclMasterAwaitTermination((pcclMasterInstance_t *)master), pcclSuccess);
    return NULL;
}

static void serve(int port)
{
    pcclReduceDescriptor_t work = sum_of(1, 0);
    pcclMasterInstance_t *master = NULL, *second = NULL;
    void (*interrupt)(int) = signal(SIGINT, SIG_DFL);
    pthread_t thread;
    pcclComm_t *comm;
    float x = 1.0f;
    signal(SIGINT, interrupt); /* whoever started this may ignore it */
    ENDS(pcclInit(), pcclSuccess);
    ENDS(pcclCreateMaster(at(port), &master), pcclSuccess);
    ENDS(pcclRunMaster(master), pcclSuccess);
    CHECK(signal(SIGTERM, SIG_DFL) == SIG_DFL && signal(SIGINT, SIG_DFL) == interrupt);
    ENDS(pcclRunMaster(master), pcclInvalidUsage);
    ENDS(pcclDestroyMaster(master), pcclInvalidUsage);
    ENDS(pcclCreateMaster(at(port), &second), pcclSuccess);
    ENDS(pcclRunMaster(second), pcclInvalidUsage); /* the port */
    ENDS(pcclDestroyMaster(second), pcclSuccess);
    CHECK(pthread_create(&thread, NULL, await, master) == 0);
    comm = created(port);
    ENDS(pcclConnect(comm), pcclSuccess);
    ENDS(pcclAllReduce(&x, &x, &work, comm, NULL), pcclTooFewPeers);
    CHECK(told("TOO_FEW_PEERS"));
    ENDS(pcclDestroyCommunicator(comm), pcclSuccess);
    ENDS(pcclInterruptMaster(master), pcclSuccess);
    CHECK(pthread_join(thread, NULL) == 0);
    ENDS(pcclDestroyMaster(master), pcclSuccess);
}

/* A child of a process that has started Python has none of its threads. */
static void in_a_child(int port)
{
    pcclComm_t *comm;
    pcclBuildInfo_t build;
    int status = -1;
    pid_t child;
    ENDS(pcclInit(), pcclSuccess);
    comm = created(port);
    ENDS(pcclConnect(comm), pcclSuccess);
    child = fork();
    if (child == 0) {
        failures = 0;
        ENDS(pcclUpdateTopology(comm), pcclInvalidUsage);
        ENDS(pcclDestroyCommunicator(comm), pcclInvalidUsage);
        ENDS(pcclInit(), pcclInvalidUsage);
        ENDS(pcclGetBuildInfo(&build), pcclInvalidUsage);
        CHECK(told("this process was forked"));
        fflush(stdout);
        _exit(failures);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    ENDS(pcclUpdateTopology(comm), pcclSuccess);
    ENDS(pcclDestroyCommunicator(comm), pcclSuccess);
}

int main(int argc, char **argv)
{
    int port = argc > 2 ? atoi(argv[2]) : 0;
    const char *mode = argc > 1 ? argv[1] : "";
    if (!strcmp(mode, "misuse"))
        misuse(port);
    else if (!strcmp(mode, "peer"))
        peer(port);
    else if (!strcmp(mode, "master"))
        serve(port);
    else if (!strcmp(mode, "leave")) {
        ENDS(pcclInit(), pcclSuccess);
        ENDS(pcclConnect(created(port)), pcclSuccess);
    } else if (!strcmp(mode, "fork")) {
        in_a_child(port);
    } else if (!strcmp(mode, "build")) {
        pcclBuildInfo_t build;
        ENDS(pcclGetBuildInfo(&build), pcclSuccess);
        printf("GPUs: %s\n", build.has_cuda_support ? "yes" : "no");
    } else
        return 100;
    return failures;
}
