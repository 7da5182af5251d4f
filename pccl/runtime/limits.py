"""Every fixed timing and limit of the runtime, with its reason.

The user's settings are in config.py, and limits of messages in pccl.protocol.messages. A limit of
a single algorithm, such as the size of its pieces, stays beside the algorithm. Code reads a limit
each time it uses it, as `limits.NAME`.
"""

from __future__ import annotations

import threading

from pccl.protocol.messages import MESSAGE_BYTES_MAX

# ---- calls, on a peer ----

FOREVER_S = threading.TIMEOUT_MAX
SLICE_S = 0.5  # a wait is cut into slices: Windows handles signals only between them
QUIET_S = 5.0  # until the log says which peers a call waits for; then twice as long, and so on,
QUIET_MAX_S = 60.0  # up to this
ATTEMPT_INTERVAL_S = 1.0  # between the attempts of `connect`
WELCOME_S = 10.0  # for the master's first answer; admission itself has no limit
PROGRESS_LOOK_S = 2.0  # between two reports to the master on the progress of long ops
WITHDRAWAL_S = 1.0  # for the master to take back a call's vote, after an exception ended the call
PENDING_AGAIN_S = 0.002  # a caller that asks for pending peers again so soon asks in a loop:
PENDING_PATIENCE_S = 0.02  # its next "no" is delayed by this, so that it does not spin

# ---- connections to the master and to other peers ----

MASTER_RETRY_S = 0.2  # between attempts to reconnect to the master
LAST_WORDS_MS = 1000  # to send a Leave
EXAMINATION_S = 10.0  # for all of `pccl doctor MASTER`; the master may take DIAL_S to dial back
GREETING_S = 4.0  # for the first bytes of the process that listens at the master's port
NAME_KEPT_S = 30.0  # for which a name's addresses are cached
NAME_RETRY_S = 0.5  # between look-ups of a name: a failure may be temporary
STAGGER_S = 0.25  # until the next address of a peer is tried, too, as RFC 8305 recommends
STREAMS_REFUSED_MAX = 3  # the membership ends when so many streams in a row get no socket
GUESTS_MAX = 1024  # unjoined connections at a rendezvous point; beyond that the oldest is closed
GUEST_BYTES = 1024  # from one before it is joined: greeting and request are shorter
RENDEZVOUS_LANES = 8  # both sides must know the number before the round trip is known
STREAM_LATE_S = 1.0  # after libzmq's own time limit, which comes first because it says more

# ---- shared state and measurements ----

SERVE_INTERVAL_S = 0.02  # PCCL_SYNC_MBITS is kept in each such interval
TRANSFER_FAILURE_S = 0.1  # until the first failure is reported; four times as long each time,
TRANSFER_FAILURES_MAX = 3  # so many times: longer than heartbeats take to detect a dead holder
REMIND_S = 0.5  # between two checks for late requests, which are then repeated
REMINDERS_MAX = 640  # so many without any answer: the holders count as lost
PROGRESS_S = 0.1  # between calls of the caller's callback
PROGRESS_LOG_S = 5.0  # between lines in the log
PROBE_CONNECT_S = 5.0  # for the first bytes of a probe; then its rate is 0
SPAN_THREADS_MAX = 8  # threads that hash or copy: enough for the memory bandwidth of any machine

# ---- weights ----

WEIGHTS_REMINDERS_MAX = 20  # so many without any answer: another holder is asked for
WEIGHTS_REST_S = 0.5  # after a failure, before another holder is asked for
WEIGHTS_SLOW_S = 20.0  # a fetch that takes longer gives its place at the holder to others
WEIGHTS_JOIN_S = 60.0  # for a master that is not up yet, unless the caller says otherwise

# ---- the master's connections ----

ACCEPT_FAILURES = 100  # read in a row at most, because libzmq may report them without end
HELLO_S = 10.0  # from the acceptance of a connection to its first message
STRANGER_BYTES = 4 << 20  # before its first message: a Resume with many small results
STRANGERS_BYTES = 16 << 20  # of all strangers together
KNOWN_BYTES = MESSAGE_BYTES_MAX + (1 << 20)  # received and not read, of one connection
HEARTBEAT_BYTES_S = 4096  # bytes a second allowed for heartbeats, which are not messages
STRANGERS_LOOK_S = 0.05  # between two checks of all connections while there are strangers,
KNOWN_LOOK_S = 0.2  # and while there are none
HANDSHAKES_MAX = 1024  # connections with an unchecked key; the oldest is refused beyond that
DIAL_S = 3.0  # for dialling a peer back; TCP retransmits a lost packet after 1 s
DIALS_MAX = 64  # dials at the same time; further ones are not made
ASKERS_MAX = 4096  # remembered hosts that asked for dials; no dials for further hosts
RECEIVED_MAX = 32  # unread messages of one connection; beyond that TCP holds it back
UNREAD_MAX = 10_000  # queued messages for one connection; beyond that it is dropped
ARRIVING_MAX = 4  # messages of a connection held back while its peer is dialled
GRACE_S = 1.0  # after a connection has ended, its messages may still arrive for this long
DESCRIPTORS_SPARE = 64  # a master's descriptors that are not for connections
CONNECTIONS_MIN = 16  # connections that are always allowed
DESCRIPTORS_REST_S = 0.2  # without a failure, until new connections are admitted again
MASTER_LOOK_S = 0.1  # between two checks of time limits
MASTER_CHORES_S = 0.01  # for which messages may delay all other work that is due
FAREWELL_MS = 200  # for the last messages of a master that ends

# ---- the master's HTTP ----

HTTP_CONNECTIONS = 32  # beyond that the oldest one is cut
HTTP_REQUEST_BYTES = 8192  # of a request's line and headers
HTTP_REQUEST_S = 10.0  # from a connection to the end of the answer
HTTP_ANSWER_S = 2.0  # for the service thread to give a snapshot
HTTP_EVENTS = 100  # latest events that are shown
HTTP_KEPT_S = 0.25  # one snapshot serves all requests for this long

# ---- the master's journal and log ----

JOURNAL_PATIENCE_S = 0.25  # for one write, before the master continues without it,
JOURNAL_STOP_S = 5.0  # or ends, with --on-journal-error stop
JOURNAL_RETRY_S = 1.0  # between two attempts to write a journal that is behind
JOURNAL_CLOSE_S = 2.0  # for the last write of a master that ends
EVENT_LOG_BYTES = 64 << 20  # of a file of the event log, before the next one is begun
EVENT_LOG_LINE_BYTES = 64 << 20  # an event log has no longer lines
EVENT_LOG_FILES = 8  # files that are kept, including the current one
EVENT_LOG_WAITING_BYTES = 32 << 20  # of events that wait for the disk; further ones are lost
EVENT_LOG_PAUSE_S = 0.02  # between two writes, so that several events are written at once
LOG_REPEAT_S = 60.0  # between two equal lines in the log
