"""Weights outward: a trainer publishes versions of its parameters, and any number of others follow.

    publisher = pccl.weights.Publisher("master:48148", parameters)
    publisher.publish()                       # after each step, or each few

    subscriber = pccl.weights.Subscriber("master:48148", parameters)
    subscriber.wait()                         # until a newer version is here, whole and verified
    subscriber.swap()                         # between two steps of its own

Publishers and subscribers use the master and the keys of a run, and are no peers of it: they vote
in nothing, and nobody waits for them. docs/howto/weights.md says more.
"""

from pccl.weights.publisher import Publication, Publisher
from pccl.weights.subscriber import Subscriber

__all__ = ["Publication", "Publisher", "Subscriber"]
