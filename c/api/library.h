/* The functions of pccl/capi/calls.py, which library.c calls through cffi. */

#ifndef PCCL_API_LIBRARY_H
#define PCCL_API_LIBRARY_H

#define PCCL_BUILDS_LIBRARY
#include "pccl.h"

/* cdef begin */
int pccl_capi_build_info(pcclBuildInfo_t *info);
const char *pccl_capi_last_error(void);
int pccl_capi_create_communicator(const pcclCommCreateParams_t *params, pcclComm_t **made);
int pccl_capi_connect(const pcclComm_t *comm);
int pccl_capi_destroy_communicator(const pcclComm_t *comm);
int pccl_capi_get_attribute(const pcclComm_t *comm, int attribute, int *value);
int pccl_capi_update_topology(const pcclComm_t *comm);
int pccl_capi_are_peers_pending(const pcclComm_t *comm, bool *pending);
int pccl_capi_optimize_topology(const pcclComm_t *comm);
int pccl_capi_all_reduce(const void *send, void *recv, const pcclReduceDescriptor_t *work,
                         const pcclComm_t *comm, pcclReduceInfo_t *info);
int pccl_capi_all_reduce_async(const void *send, void *recv, const pcclReduceDescriptor_t *work,
                               const pcclComm_t *comm, pcclAsyncReduceOp_t *op);
int pccl_capi_await_async_reduce(const pcclAsyncReduceOp_t *op, pcclReduceInfo_t *info);
int pccl_capi_all_reduce_multiple(const pcclReduceOpDescriptor_t *ops, size_t count,
                                  const pcclComm_t *comm, pcclReduceInfo_t *info,
                                  int max_in_flight);
int pccl_capi_synchronize(const pcclComm_t *comm, pcclSharedState_t *state, int strategy,
                          pcclSharedStateSyncInfo_t *info);
int pccl_capi_create_master(const ccoip_socket_address_t *address, pcclMasterInstance_t **made);
int pccl_capi_run_master(const pcclMasterInstance_t *master);
int pccl_capi_interrupt_master(const pcclMasterInstance_t *master);
int pccl_capi_await_master(const pcclMasterInstance_t *master);
int pccl_capi_destroy_master(const pcclMasterInstance_t *master);
/* cdef end */

/* Called once pccl/capi/calls.py has implemented these functions. */
void pccl_capi_implement(void);

#endif
