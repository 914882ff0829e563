"""Chaos: engines at full load over a pool that is too small, while everything around them breaks.

``python -m tests.chaos --seconds 600 --engines 4 --seed 1``, or ``make chaos``. Every random choice comes from the
seed; what the kernel's scheduler makes of them does not.

**What is checked.** The pool has memory (`memory`): a file that every engine maps. Before an engine reads or writes any
of it, it checks all that it has: a cached block must hold what the tokens up to its end demand, whoever computed it,
and a private block must hold, byte for byte, what this lease wrote last. So a block with two owners is caught by the
first of them that looks, and the report names both. Besides, answers are checked against what the contract promises
(`judge`), a mirror of the tree is kept from the events (`mirror`), and every now and then all engines stop, and the
server is compared with a full walk, with the memory, the mirror, and the engines' own books (`census`).

**What an engine may rely on.** Only the contract: past ``client.valid_until``, or under another epoch, it touches
nothing, and it looks at both at the last moment before it touches anything. Between that look and the last byte
written nothing may happen that ends a lease, or else the checks would have to be forgiving. On a GPU a margin of time
does that; here it is exact (`clock`): the lease clock, which the server and all engines read, stands still while any
engine is at the memory. It moves in ticks, and a tick, a jump and the pausing of an engine (SIGSTOP) each wait until
nobody is there. So there is no excuse for a wrong byte: not a jump, not a pause, not a slow machine.

**What breaks.** Engines are killed, paused beyond their leases' time and replaced; the server is killed and restarted;
the clock jumps; connections are cut and replies are held back (`network`); calls are cancelled, cut by deadlines, and
their replies lost (`unreliable`); streams are dropped; some read their streams slowly or never (`readers`); and
somebody asks for the figures all the while.

**What is not promised, and so not checked.** A server that begins without its state, over a pool that engines still
use, must hand out nothing until their leases have run out: where it can't know that by itself, whoever restarts it
waits for one ttl.
"""
