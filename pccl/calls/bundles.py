"""Bundles: neighbours in a list of all-reduces that become one collective.

An agreement on the start and one on the end cost as much for a few bytes as for many, so a model of
150 tensors would spend most of its time on them. All peers make the same bundles, because these
follow from the descriptors alone, which are the same on all peers.
"""

from __future__ import annotations

from collections.abc import Sequence

from pccl.descriptors import ReduceOpDescriptor

BUNDLE_BYTES = 64 << 20  # then another one begins, so that several overlap
BUNDLE_PARTS = 1024  # descriptors


def bundles(descriptors: Sequence[ReduceOpDescriptor]) -> list[list[ReduceOpDescriptor]]:
    """Cuts the list into bundles of the same operation, element type and quantization."""
    made: list[list[ReduceOpDescriptor]] = []
    nbytes = 0
    for descriptor in descriptors:
        last = made[-1] if made else None
        size = _nbytes(descriptor)
        fits = last is not None and nbytes + size <= BUNDLE_BYTES and len(last) < BUNDLE_PARTS
        if last is not None and fits and _kind(last[0]) == _kind(descriptor):
            last.append(descriptor)
            nbytes += size
        else:
            made.append([descriptor])
            nbytes = size
    return made


def _nbytes(descriptor: ReduceOpDescriptor) -> int:
    work = descriptor.reduce_descriptor
    return work.count * work.operand_descriptor.datatype.itemsize


def _kind(descriptor: ReduceOpDescriptor) -> tuple[object, ...]:
    work = descriptor.reduce_descriptor
    return work.op, work.operand_descriptor.datatype, work.quantization_options
