"""The threads that read, and the slots that they fill.

What may be read or evicted is decided by `Cache` and `Scheduler`, which are plain state machines; here they get a lock,
a clock and threads, and nothing else. A reader's turn is: make tickets of what was predicted (`told`), take the next
read that has a slot, read it with the lock let go, and say that it has landed. Readers touch bytes only, never mlx.

A read that fails is raised to whoever waits for it. A prefetch that fails is counted, kept in `prefetch_error`, and
costs nothing else: the demand for that expert reads again, and raises itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...errors import ContractError
from ..cache.cache import Cache, Grant
from ..schedule.schedule import P0, Scheduler, Ticket
from ..store.slab import Slab
from ..store.store import ExpertStore
from .told import Wish

if TYPE_CHECKING:
    import mlx.core as mx

    from .cores import Cores
    from .fill import Fill

__all__ = ["Readers"]


class Readers:
    """Slots, and the threads that fill them (see the module text).

    Args:
        store: where experts are read from.
        cache: what is resident; its pools become the slabs.
        scheduler: what is read next.
        threads: readers beside the asking thread.
        cores: where they read, and where passes run; None = anywhere.
        clock: seconds, monotonic.

    Raises:
        ContractError: cores that may not be used any more.

    Attributes:
        slabs: one a pool of the cache.
        prefetch_error: the last error of a speculative read, None if there was none.
        prefetch_errors: how many there were.
        drained_s: seconds that `drain` has waited.
        ended: told of every read's ticket and when it was over, with the lock held.
        outside: key outside of the cache -> who is told when its read ends.
    """

    def __init__(
        self,
        store: ExpertStore,
        cache: Cache,
        scheduler: Scheduler,
        *,
        threads: int = 4,
        cores: Cores | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.store, self.cache, self.scheduler, self.cores, self.clock = store, cache, scheduler, cores, clock
        sizes = {cache.pool_of(layer): store.layouts[layer].slot_bytes for layer in range(store.layers)}
        self.slabs = [Slab(sizes[pool], cache.pool_slots[pool]) for pool in range(len(sizes))]
        self.prefetch_error: BaseException | None = None
        self.prefetch_errors, self.drained_s = 0, 0.0
        self.ended: list[Callable[[Ticket, float], None]] = []
        # One lock, and idle readers wait for `_work`: woken for nothing they take a core from the thread that computes.
        lock = threading.Lock()
        self._change, self._work = threading.Condition(lock), threading.Condition(lock)
        self._reads = 0  # in progress
        self._failed: dict[int, BaseException] = {}
        self._told: deque[Wish] = deque()  # predictions that have no tickets yet
        self.outside: dict[int, Fill] = {}
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"expert-reader-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()
            if cores is not None:
                try:
                    cores.read_on(thread)
                except BaseException:
                    self.close()
                    raise

    def slab(self, layer: int) -> Slab:
        return self.slabs[self.cache.pool_of(layer)]

    def arrays(self, layer: int) -> dict[str, mx.array]:
        """Tensor name → `[slots, *shape]` over the layer's slab."""
        return self.slab(layer).arrays(self.store.layouts[layer])

    def catch_up(self) -> None:
        """All that was predicted so far has its tickets when this returns."""
        with self._change:
            self._take_in()

    def drain(self) -> None:
        """Return when nothing is queued or in progress. Raises ContractError once the memory is closed."""
        began = self.clock()
        with self._change:
            self._take_in()
            while self.scheduler.pending:
                self._check_open()
                self._change.wait(timeout=0.1)
                self._take_in()
        self.drained_s += self.clock() - began

    def close(self) -> None:
        """Stop the readers; reads in progress are waited for. Safe to call twice."""
        with self._change:
            self._closed = True
            self._change.notify_all()
            self._work.notify_all()
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join()

    def _take_in(self) -> None:
        """What was told gets its tickets. An error counts as a prefetch's, and keeps no later prediction waiting."""
        while self._told:
            wish = self._told.popleft()
            try:
                for ticket in wish.tickets():
                    self.scheduler.submit(ticket, wish.now)
                    self._work.notify()
            except Exception as error:
                self.prefetch_errors, self.prefetch_error = self.prefetch_errors + 1, error

    def _serve(self) -> None:
        with self._change:
            while not self._closed:
                if (started := self._start(urgent=False)) is not None:
                    self._read(*started)
                else:
                    self._work.wait()

    def _start(self, *, urgent: bool) -> tuple[Ticket, Grant | None] | None:
        """The next read and its slot (None: outside of the cache); None if there is no read, or no slot for it."""
        self._take_in()  # what was told protects experts that this slot could be taken from
        while (ticket := self.scheduler.next(self.clock(), urgent_only=urgent)) is not None:
            if ticket.key in self.outside:
                return ticket, None
            grant = self.cache.reserve(ticket.key, speculative=ticket.priority != P0)
            if grant is not None:
                return ticket, grant
            self.scheduler.postpone(ticket, self.clock())
            if ticket.priority == P0:
                return None
        return None

    def _read(self, ticket: Ticket, grant: Grant | None) -> None:
        """Read into the granted slot. Called with the lock, which is let go during the read."""
        fill, error = self.outside.get(ticket.key), None
        out = self.slabs[grant.pool].host[grant.slot] if grant is not None else fill.pending[ticket.key]
        self._reads += 1
        self._change.release()
        try:
            self.store.read_into(ticket.layer, ticket.key % self.store.experts, out)
        except BaseException as raised:  # typed by the store; handed to whoever waits for this expert
            error = raised
        finally:
            self._change.acquire()
            self._reads -= 1
        now = self.clock()
        self.scheduler.finish(ticket, now, ok=error is None)
        for tell in self.ended:
            tell(ticket, now)
        if grant is None:
            fill.landed(ticket.key, error)
        elif error is None:
            self.cache.settle(ticket.key, grant.generation)
        else:
            self.cache.abandon(ticket.key, grant.generation)
            if ticket.priority == P0:
                self._failed[ticket.key] = error
            else:
                self.prefetch_errors, self.prefetch_error = self.prefetch_errors + 1, error
        self._change.notify_all()
        if self.scheduler.queued_bytes:  # for want of bytes in flight, it may be, or of this slot
            self._work.notify()
        if error is not None and not isinstance(error, Exception):  # the reading thread was interrupted
            raise error

    def _check_open(self) -> None:
        if self._closed:
            raise ContractError("this expert memory is closed", field="memory", got="closed", expected="open")
