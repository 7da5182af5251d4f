/* pccl for C and C++ programs: collectives between peers that come and go.
 *
 *     cc $(pccl cflags) program.c $(pccl libs) -o program
 *
 * A program calls pcclInit() once. Each process is one peer of a run: it creates a communicator,
 * connects it to the run's master, and calls collectives with the other peers, which may be C or
 * Python programs. All functions return a result. After a failure, pcclGetLastError() gives the
 * cause and the remedy, and the log on stderr has details (PCCL_LOG_LEVEL).
 *
 * Any thread may call any function, and several threads may use one communicator. Calls block
 * until the other peers of the group make the same call. Calls do what the Python API does, with
 * the same settings in environment variables: docs/reference/c.md, docs/reference/api.md,
 * docs/howto/tuning.md.
 *
 * Pointers to results must not be NULL, unless the function allows it. A call with an invalid
 * argument or a destroyed communicator or master, or at the wrong time, changes nothing and returns
 * pcclInvalidArgument or pcclInvalidUsage. */

#ifndef PCCL_H
#define PCCL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) && defined(PCCL_BUILDS_LIBRARY)
#define PCCL_EXPORT __declspec(dllexport)
#elif defined(_WIN32)
#define PCCL_EXPORT __declspec(dllimport)
#elif defined(__GNUC__)
#define PCCL_EXPORT __attribute__((visibility("default")))
#else
#define PCCL_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* types begin */

/* The result of a call. */
typedef enum pcclResult_t {
    pcclSuccess = 0,
    pcclNotInitialized = 1,         /* pcclInit() has not succeeded */
    pcclInternalError = 2,          /* a bug, or the system has no more memory or descriptors */
    pcclInvalidArgument = 3,        /* an argument is not valid, or peers ask for different work */
    pcclInvalidUsage = 4,           /* the call is not allowed now, or peers are in other calls */
    pcclTooFewPeers = 5,            /* this peer is alone in its group */
    pcclMasterConnectionFailed = 6, /* the master cannot be reached, or is gone */
    pcclRankConnectionFailed = 7,   /* another peer cannot be reached */
    pcclRankConnectionLost = 8,     /* another peer was lost: inputs are unchanged, call again */
    pcclNoSharedStateAvailable = 9, /* no peer offers the shared state that this one needs */
    pcclPendingAsyncOps = 10,       /* await the launched collectives first */
    pcclUpdateTopologyFailed = 11,
    pcclTopologyOptimizationFailed = 12,
    pcclTimeout = 13 /* this peer's time limit, or another peer's, has passed: call again */
} pcclResult_t;

/* Element types. */
typedef enum pcclDataType_t {
    pcclUint8 = 0,
    pcclInt8 = 1,
    pcclInt16 = 2,
    pcclUint16 = 3,
    pcclUint32 = 4,
    pcclInt32 = 5,
    pcclUint64 = 6,
    pcclInt64 = 7,
    pcclFloat16 = 8,
    pcclBFloat16 = 9,
    pcclFloat = 10,
    pcclDouble = 11
} pcclDataType_t;

/* The place of memory: in the host, or on the current GPU, which needs torch with CUDA. */
typedef enum pcclDeviceType_t { pcclDeviceCpu = 0, pcclDeviceCuda = 1 } pcclDeviceType_t;

/* The operation of a reduction. The average of integers is rounded towards 0. */
typedef enum pcclRedOp_t {
    pcclSum = 0,
    pcclAvg = 1,
    pcclProd = 2,
    pcclMax = 3,
    pcclMin = 4
} pcclRedOp_t;

/* Numbers that pcclGetAttribute() returns. Only accepted peers count. */
typedef enum pcclAttribute_t {
    PCCL_ATTRIBUTE_GLOBAL_WORLD_SIZE = 1,             /* peers of the run */
    PCCL_ATTRIBUTE_PEER_GROUP_WORLD_SIZE = 2,         /* peers of this peer's group */
    PCCL_ATTRIBUTE_NUM_DISTINCT_PEER_GROUPS = 3,      /* groups */
    PCCL_ATTRIBUTE_LARGEST_PEER_GROUP_WORLD_SIZE = 4  /* peers of the largest group */
} pcclAttribute_t;

/* A peer's role in the choice of the shared state's content. */
typedef enum pcclSharedStateSyncStrategy_t {
    PCCL_SHARED_STATE_SYNC_STRATEGY_ENFORCE_POPULAR = 0, /* the most common content wins */
    PCCL_SHARED_STATE_SYNC_STRATEGY_RECEIVE_ONLY = 1,    /* this peer receives from the senders */
    PCCL_SHARED_STATE_SYNC_STRATEGY_SEND_ONLY = 2        /* this peer offers its content */
} pcclSharedStateSyncStrategy_t;

/* The distribution of values, which has no effect. */
typedef enum pcclDistributionHint_t {
    pcclDistributionNone = 0,
    pcclDistributionNormal = 1,
    pcclDistributionUniform = 2
} pcclDistributionHint_t;

/* The quantization of floats on the wire. The block-wise algorithms have a scale for each 256 (8
 * bits) or 64 (4 bits) elements, and ignore quantized_datatype. docs/internals/quantization.md has
 * the errors. */
typedef enum pcclQuantizationAlgorithm_t {
    pcclQuantNone = 0,
    pcclQuantMinMax = 1,
    pcclQuantZeroPointScale = 2,
    pcclQuantBlockwiseInt8 = 3,
    pcclQuantBlockwiseInt4 = 4
} pcclQuantizationAlgorithm_t;

typedef enum ccoip_inet_protocol_t { inetIPv4 = 0, inetIPv6 = 1 } ccoip_inet_protocol_t;

/* The bytes of an address, in network byte order. */
typedef struct ccoip_ipv4_address_t {
    uint8_t data[4];
} ccoip_ipv4_address_t;

typedef struct ccoip_ipv6_address_t {
    uint8_t data[16];
} ccoip_ipv6_address_t;

/* An IPv4 or IPv6 address, as `protocol` says. */
typedef struct ccoip_inet_address_t {
    ccoip_inet_protocol_t protocol;
    ccoip_ipv4_address_t ipv4;
    ccoip_ipv6_address_t ipv6;
} ccoip_inet_address_t;

typedef struct ccoip_socket_address_t {
    ccoip_inet_address_t inet;
    uint16_t port; /* in this machine's byte order */
} ccoip_socket_address_t;

/* Handles of a communicator (one peer of a run) and of a master. They do not point to memory. */
typedef struct pcclComm_t pcclComm_t;
typedef struct pcclMasterInstance_t pcclMasterInstance_t;

typedef struct pcclCommCreateParams_t {
    ccoip_socket_address_t master_address;
    uint32_t peer_group;               /* peers of a group share collectives and shared state */
    uint32_t p2p_connection_pool_size; /* connections to each neighbor; 0: chosen for the link */
} pcclCommCreateParams_t;

/* Statistics of a collective. */
typedef struct pcclReduceInfo_t {
    uint32_t local_world_size; /* number of peers that contributed */
    uint64_t tx_bytes;         /* payload bytes that this peer has sent */
    uint64_t rx_bytes;         /* payload bytes that this peer has received */
} pcclReduceInfo_t;

typedef struct pcclReduceOperandDescriptor_t {
    pcclDataType_t datatype;
    pcclDistributionHint_t distribution_hint;
} pcclReduceOperandDescriptor_t;

typedef struct pcclQuantizationOptions_t {
    pcclDataType_t quantized_datatype; /* on the wire: 8 or 16 bits, signed or unsigned */
    pcclQuantizationAlgorithm_t algorithm;
} pcclQuantizationOptions_t;

/* A collective, which all peers must describe alike. Collectives with different tags can run at the
 * same time. */
typedef struct pcclReduceDescriptor_t {
    size_t count; /* elements */
    pcclRedOp_t op;
    uint64_t tag;
    pcclReduceOperandDescriptor_t src_descriptor;
    pcclQuantizationOptions_t quantization_options;
} pcclReduceDescriptor_t;

/* A collective and its memory. sendbuf may be recvbuf, but must not overlap it in part. */
typedef struct pcclReduceOpDescriptor_t {
    void *sendbuf;
    void *recvbuf;
    pcclReduceDescriptor_t descriptor;
} pcclReduceOpDescriptor_t;

/* A collective that was launched. */
typedef struct pcclAsyncReduceOp_t {
    pcclComm_t *comm;
    uint64_t tag;
} pcclAsyncReduceOp_t;

/* One entry of the shared state. Names, types and counts are the same on all peers. */
typedef struct pcclTensorInfo_t {
    const char *name; /* UTF-8, at most 256 characters */
    void *data;
    size_t count; /* elements */
    pcclDataType_t datatype;
    pcclDeviceType_t device_type;
    bool allow_content_inequality; /* peers do not compare the content; only newcomers receive it */
} pcclTensorInfo_t;

typedef struct pcclSharedState_t {
    uint64_t revision; /* the highest one wins; a call sets it to the elected revision */
    size_t count;      /* entries */
    pcclTensorInfo_t *infos;
} pcclSharedState_t;

typedef struct pcclSharedStateSyncInfo_t {
    uint64_t tx_bytes;
    uint64_t rx_bytes;
} pcclSharedStateSyncInfo_t;

typedef struct pcclBuildInfo_t {
    bool has_cuda_support; /* whether pcclDeviceCuda works here */
} pcclBuildInfo_t;

/* types end */

/* ---- the library ---- */

/* Starts the library: a Python interpreter in this process, without signal handlers. Repeated
 * calls do nothing. pcclInternalError: Python or the package pccl was not found; stderr says why. */
PCCL_EXPORT pcclResult_t pcclInit(void);

/* The capabilities of this installation. May be called before pcclInit(), and then also starts the
 * interpreter. */
PCCL_EXPORT pcclResult_t pcclGetBuildInfo(pcclBuildInfo_t *info_out);

/* The error of this thread's last failed call, in words; "" if none has failed. The text is valid
 * until this thread's next call. */
PCCL_EXPORT const char *pcclGetLastError(void);

/* ---- one peer of a run ---- */

/* Creates a communicator, without any I/O. The program destroys it when it no longer uses it. */
PCCL_EXPORT pcclResult_t pcclCreateCommunicator(const pcclCommCreateParams_t *params,
                                                pcclComm_t **comm_out);

/* Joins the run: returns when all accepted peers have admitted this one in pcclUpdateTopology().
 * pcclMasterConnectionFailed: no master answers; call again later. */
PCCL_EXPORT pcclResult_t pcclConnect(pcclComm_t *comm);

/* Leaves the run. Collectives in progress fail, including those in other threads. */
PCCL_EXPORT pcclResult_t pcclDestroyCommunicator(pcclComm_t *comm);

PCCL_EXPORT pcclResult_t pcclGetAttribute(const pcclComm_t *comm, pcclAttribute_t attribute,
                                          int *value_out);

/* Admits peers that wait. All accepted peers of all groups call it. */
PCCL_EXPORT pcclResult_t pcclUpdateTopology(pcclComm_t *comm);

/* Whether peers wait; all callers get the same answer. All accepted peers of all groups call it. */
PCCL_EXPORT pcclResult_t pcclArePeersPending(const pcclComm_t *comm, bool *pending_out);

/* Measures the links between the peers, and chooses the fastest ring. All accepted peers call it. */
PCCL_EXPORT pcclResult_t pcclOptimizeTopology(const pcclComm_t *comm);

/* ---- collectives ---- */

/* Reduces `sendbuf` over all peers of the group into `recvbuf`, with the same bits on all of them.
 * pcclRankConnectionLost: a peer was lost. `sendbuf` is unchanged then, even if it is `recvbuf`:
 * call again, and the remaining peers continue. `info_out` may be NULL. */
PCCL_EXPORT pcclResult_t pcclAllReduce(const void *sendbuf, void *recvbuf,
                                       const pcclReduceDescriptor_t *descriptor,
                                       const pcclComm_t *comm, pcclReduceInfo_t *info_out);

/* Launches an all-reduce. Its memory belongs to the library until pcclAwaitAsyncReduce(). */
PCCL_EXPORT pcclResult_t pcclAllReduceAsync(const void *sendbuf, void *recvbuf,
                                            const pcclReduceDescriptor_t *descriptor,
                                            const pcclComm_t *comm,
                                            pcclAsyncReduceOp_t *reduce_handle_out);

/* Waits for a launched all-reduce, and returns its result. Only once for each. `info_out` may be
 * NULL. */
PCCL_EXPORT pcclResult_t pcclAwaitAsyncReduce(const pcclAsyncReduceOp_t *reduce_handle,
                                              pcclReduceInfo_t *info_out);

/* Runs several all-reduces, up to `max_in_flight` at a time, and repeats each until it has
 * succeeded. All peers give the same list. `info_out` may be NULL. */
PCCL_EXPORT pcclResult_t pcclAllReduceMultipleWithRetry(const pcclReduceOpDescriptor_t *descriptors,
                                                        size_t count, const pcclComm_t *comm,
                                                        pcclReduceInfo_t *info_out,
                                                        int max_in_flight);

/* ---- shared state ---- */

/* Makes the shared state of all peers of the group bit-identical. If the call fails on a peer whose
 * revision was behind, that peer's content is torn: it is not offered to others until a call
 * succeeds, or the program sets another revision. `info_out` may be NULL. */
PCCL_EXPORT pcclResult_t pcclSynchronizeSharedState(const pcclComm_t *comm,
                                                    pcclSharedState_t *shared_state,
                                                    pcclSharedStateSyncStrategy_t strategy,
                                                    pcclSharedStateSyncInfo_t *info_out);

/* ---- a master in this process ---- */

PCCL_EXPORT pcclResult_t pcclCreateMaster(ccoip_socket_address_t listen_address,
                                          pcclMasterInstance_t **master_out);

/* Starts a master, which then serves in the background. */
PCCL_EXPORT pcclResult_t pcclRunMaster(pcclMasterInstance_t *master);

/* Stops a master; its port is free again when this returns. All peers lose their master. */
PCCL_EXPORT pcclResult_t pcclInterruptMaster(pcclMasterInstance_t *master);

/* Returns when a master has stopped, because another thread has interrupted it or it has failed. */
PCCL_EXPORT pcclResult_t pcclMasterAwaitTermination(pcclMasterInstance_t *master);

/* Frees a master. pcclInvalidUsage: it is still running. */
PCCL_EXPORT pcclResult_t pcclDestroyMaster(pcclMasterInstance_t *master);

#ifdef __cplusplus
}
#endif

#endif
