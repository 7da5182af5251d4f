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
    uint16_t segment;        /* chunk; request, data: the requester's slot; row: the sender's
                              * position */
    uint16_t step;           /* chunk; request, data: a number that the data repeats; row: the
                              * receiver's position */
    uint16_t members;
    bool eager;              /* chunk: sent before START; `seq` is then the sender's op number, and
                              * `nonce` that of the epoch */
    uint32_t piece;          /* request, data; row: number of the array */
    uint32_t length;         /* chunk: offsets; else bytes */
    uint64_t run;
    uint64_t seq;
    uint64_t tag;
    uint64_t nonce;
    uint64_t offset;         /* chunk: of the op; else bytes */
};

/* Writes the WIRE_HEADER_BYTES bytes of `header` to `bytes`. Cannot fail. */
void wire_encode(const struct wire_header *header, unsigned char *bytes);

/* Reads WIRE_HEADER_BYTES bytes. Returns false if they are not a header of this version. The op
 * checks the other fields. */
bool wire_decode(struct wire_header *header, const unsigned char *bytes);

/* Changes the step of an encoded header. Cannot fail. */
void wire_set_step(unsigned char *bytes, uint16_t step);

#endif
