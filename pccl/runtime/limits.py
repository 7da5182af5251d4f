"""Every fixed timing and limit of the runtime, with its reason: what a log or a delay comes from.

What a user may set is in config.py, what a message may hold in pccl.protocol.messages.values. What
concerns one algorithm only, such as the size of the pieces that it works on, stays beside it. Each
is read at the moment it is used, as `limits.NAME`.
"""

from __future__ import annotations

import threading

from pccl.protocol.messages import MESSAGE_BYTES_MAX

# ---- calls, on a peer ----

FOREVER_S = threading.TIMEOUT_MAX
SLICE_S = 0.5  # of a wait without an end: on Windows signals are handled between two slices only
QUIET_S = 5.0  # a call waits so long before the log says for whom; then twice as long, and so on,
QUIET_MAX_S = 60.0  # up to this
ATTEMPT_INTERVAL_S = 1.0  # between the attempts of `connect`
WELCOME_S = 10.0  # for the master's first answer; admission may take as long as it takes
WITHDRAWAL_S = 1.0  # for the master to take back the vote of a call that an exception has ended
PENDING_AGAIN_S = 0.002  # who asks whether peers are pending so soon after a no asks in a loop,
PENDING_PATIENCE_S = 0.02  # and hears another no so much later: no core is busy with nothing

# ---- the way to the master and to other peers ----

MASTER_RETRY_S = 0.2  # between attempts to reach a master that is gone
LAST_WORDS_MS = 1000  # for a Leave to go out
EXAMINATION_S = 10.0  # for all of `pccl doctor MASTER`; the master may take DIAL_S to dial back
NAME_KEPT_S = 30.0  # so long the addresses of a name are not looked up again
NAME_RETRY_S = 0.5  # between look-ups of a name, which may fail for a moment
STREAMS_REFUSED_MAX = 3  # streams in a row for which a process gets no socket: then it has to end
STREAM_LATE_S = 1.0  # libzmq's own limit for a connection ends so much earlier: it knows more

# ---- shared state and measurements ----

SERVE_INTERVAL_S = 0.02  # PCCL_SYNC_MBITS is kept in each such time
TRANSFER_FAILURE_S = 0.1  # until a first failure is told; four times as long each time
REMIND_S = 5.0  # where nothing comes for so long, all that is not answered is asked for again
REMINDERS_MAX = 64  # then holders that do not answer count as lost
PROGRESS_S = 0.1  # between calls of the caller's callback
PROGRESS_LOG_S = 5.0  # between lines in the log
PROBE_CONNECT_S = 5.0  # for the first bytes of a probe; then nothing will come
SPAN_THREADS_MAX = 8  # that hash or copy; they saturate the memory of any machine

# ---- the master's connections ----

ACCEPT_FAILURES = 100  # that are read in a row; libzmq may tell of them without end
HELLO_S = 10.0  # from the acceptance of a connection to its first message
STRANGER_BYTES = 4 << 20  # before its first message: a Resume with many small results
STRANGERS_BYTES = 16 << 20  # of all strangers together
KNOWN_BYTES = MESSAGE_BYTES_MAX + (1 << 20)  # of a connection, that the master has not read yet
HEARTBEAT_BYTES_S = 4096  # a second of heartbeats, which are no messages, however often they come
STRANGERS_LOOK_S = 0.05  # between two looks at all connections while there are strangers,
KNOWN_LOOK_S = 0.2  # and while there are none
HANDSHAKES_MAX = 1024  # connections whose key is not judged yet; beyond that the oldest is refused
DIAL_S = 3.0  # for dialling a peer back once; a lost packet is sent again after 1 s
DIALS_MAX = 64  # at the same time; any more are not made
ASKERS_MAX = 4096  # that are remembered; while there are more, newcomers are not dialled
RECEIVED_MAX = 32  # messages of one connection that wait to be read; then TCP holds it back
UNREAD_MAX = 10_000  # messages that wait for one connection to read them; then it is lost
ARRIVING_MAX = 4  # messages of a connection that wait for its welcome
GRACE_S = 1.0  # between the end of a connection and the end of all that may still come of it
DESCRIPTORS_SPARE = 64  # descriptors of a master that are for something else than connections,
CONNECTIONS_MIN = 16  # but not where that would leave fewer for these
DESCRIPTORS_REST_S = 0.2  # without a failure, before new connections are admitted again
MASTER_LOOK_S = 0.1  # between two looks at what has a time limit
FAREWELL_MS = 200  # for the last messages of a master that ends

# ---- the master's HTTP ----

HTTP_CONNECTIONS = 32  # beyond that the oldest one is cut
HTTP_REQUEST_BYTES = 8192  # of a request's line and headers
HTTP_REQUEST_S = 10.0  # from a connection to the end of the answer
HTTP_ANSWER_S = 2.0  # for the service thread to say how things are
HTTP_KEPT_S = 0.25  # for so long one answer of it serves all requests

# ---- the master's journal and log ----

JOURNAL_PATIENCE_S = 0.25  # for one write, before the master goes on without it,
JOURNAL_STOP_S = 5.0  # or ends, with --on-journal-error stop
JOURNAL_RETRY_S = 1.0  # between two attempts to write a journal that is behind
JOURNAL_CLOSE_S = 2.0  # for the last write of a master that ends
LOG_REPEAT_S = 60.0  # between two lines of the log that say the same
