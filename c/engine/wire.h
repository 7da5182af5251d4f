/* wire.h - the 64-byte header in front of every payload (pccl_core.h, THE WIRE). Pure functions. */
#ifndef PCCL_WIRE_H
#define PCCL_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { WIRE_HEADER_BYTES = 64 };

enum wire_kind { WIRE_CHUNK = 1, WIRE_REQUEST = 2, WIRE_DATA = 3, WIRE_ROW = 4 };

struct wire_header {
    enum wire_kind kind;
    uint8_t ring;
    uint16_t segment;        /* of a chunk; the requester's slot in a request and in data; the
                              * sender's position in a row */
    uint16_t step;            /* of a chunk; the receiver's position in a row */
    uint16_t members;
    bool eager;              /* a chunk: sent before START. `seq` is the sender's call, and `nonce`
                              * its epoch's */
    uint32_t piece;          /* the part of a row */
    uint32_t length;         /* offsets of a chunk, else bytes */
    uint64_t run;
    uint64_t seq;
    uint64_t tag;
    uint64_t nonce;
    uint64_t offset;         /* as length */
};

/* Writes the WIRE_HEADER_BYTES bytes of `header` to `bytes`. Cannot fail. */
void wire_encode(const struct wire_header *header, unsigned char *bytes);

/* Reads WIRE_HEADER_BYTES bytes. False when they are no header of this version. What a header
 * says is not checked beyond that: the op it is for knows what is possible. */
bool wire_decode(struct wire_header *header, const unsigned char *bytes);

/* Changes the step of an encoded header. Cannot fail. */
void wire_set_step(unsigned char *bytes, uint16_t step);

#endif
