"""Distribution of weights: a trainer publishes versions of its parameters, and others fetch them.

    publisher = pccl.weights.Publisher("master:48148", parameters)
    publisher.publish()                       # after each step, or every few steps

    subscriber = pccl.weights.Subscriber("master:48148", parameters)
    subscriber.wait()                         # until a newer version is here, whole and verified
    subscriber.swap()                         # between two steps of its own

Publishers and subscribers use the master and the keys of a run, but are not peers: they take part
in no collective, and no peer waits for them. docs/howto/weights.md has the details.
"""

from pccl.weights.publisher import Publication, Publisher
from pccl.weights.subscriber import Subscriber

__all__ = ["Publication", "Publisher", "Subscriber"]
