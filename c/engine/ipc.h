/* ipc.h - what the engine sets on a connection between two processes of one machine. */
#ifndef PCCL_IPC_H
#define PCCL_IPC_H

/* Lets a connection to an `ipc://` endpoint take whole chunks at once. Does nothing if the
 * descriptor is that of another connection, and where the operating system does not allow it.
 * Cannot fail. */
void ipc_prepare(int fd, const char *endpoint);

#endif
