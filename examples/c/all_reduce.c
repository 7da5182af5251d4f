/* One peer of a run, in C: adds up an array with another peer, which may be of any language.
 *
 *     cc -std=c99 $(pccl cflags) examples/c/all_reduce.c $(pccl libs) -o all_reduce
 *     pccl master &
 *     ./all_reduce 127.0.0.1 48148 & ./all_reduce 127.0.0.1 48148
 *
 * In place of the second one, a Python peer does as well:
 *
 *     with pccl.Communicator("127.0.0.1:48148") as comm:
 *         comm.wait_for_peers(2)
 *         x = np.ones(1_000_000, np.float32)
 *         comm.all_reduce(x, op="sum")
 */

#include <pccl.h>
#include <stdio.h>
#include <stdlib.h>

#define COUNT 1000000
#define PEERS 2

/* Ends the program if a call has failed, with the reason. */
static void must(pcclResult_t result)
{
    if (result != pcclSuccess) {
        fprintf(stderr, "result %d: %s\n", (int)result, pcclGetLastError());
        exit(1);
    }
}

/* "127.0.0.1" and a port as the address of a master. */
static ccoip_socket_address_t address_of(const char *host, const char *port)
{
    ccoip_socket_address_t address = {{inetIPv4, {{0}}, {{0}}}, 0};
    unsigned parts[4];
    int i;
    if (sscanf(host, "%u.%u.%u.%u", &parts[0], &parts[1], &parts[2], &parts[3]) != 4) {
        fprintf(stderr, "%s is not an IPv4 address\n", host);
        exit(2);
    }
    for (i = 0; i < 4; i++)
        address.inet.ipv4.data[i] = (uint8_t)parts[i];
    address.port = (uint16_t)atoi(port);
    return address;
}

/* Admits peers until there are enough of them. */
static void wait_for_peers(pcclComm_t *comm)
{
    int peers = 0;
    for (;;) {
        bool pending;
        must(pcclGetAttribute(comm, PCCL_ATTRIBUTE_PEER_GROUP_WORLD_SIZE, &peers));
        if (peers >= PEERS)
            return;
        must(pcclArePeersPending(comm, &pending));
        if (pending)
            must(pcclUpdateTopology(comm));
    }
}

int main(int argc, char **argv)
{
    pcclCommCreateParams_t params = {{{inetIPv4, {{0}}, {{0}}}, 0}, 0, 0};
    pcclReduceDescriptor_t work = {COUNT, pcclSum, 0, {pcclFloat, pcclDistributionNone},
                                   {pcclUint8, pcclQuantNone}};
    pcclReduceInfo_t info;
    pcclResult_t result;
    pcclComm_t *comm;
    float *x = (float *)malloc(COUNT * sizeof *x);
    int i;

    if (argc != 3 || !x) {
        fprintf(stderr, "usage: %s HOST PORT\n", argv[0]);
        return 2;
    }
    params.master_address = address_of(argv[1], argv[2]);
    for (i = 0; i < COUNT; i++)
        x[i] = 1.0f;

    must(pcclInit());
    must(pcclCreateCommunicator(&params, &comm));
    must(pcclConnect(comm));
    wait_for_peers(comm);
    do {
        result = pcclAllReduce(x, x, &work, comm, &info);
    } while (result == pcclRankConnectionLost); /* x holds what it held: go on with the others */
    must(result);
    printf("the sum over %u peers is %.1f\n", (unsigned)info.local_world_size, x[COUNT - 1]);
    must(pcclDestroyCommunicator(comm));
    free(x);
    return 0;
}
