"""Mutants of what concerns peers to which nobody can connect."""

from __future__ import annotations

from mutations import Mutant

MUTANTS = (
    Mutant(
        "two that only dial out are no neighbours in a ring, if that can be avoided",
        "            order = _spread(order, outgoing.keys(), barred)\n",
        "            pass\n",
    ),
    Mutant(
        "nor are the first and the last of its order",
        "    if len(kept) > 1 and barred((kept[-1][-1], kept[0][0])):\n",
        "    if False:\n",
    ),
    Mutant(
        "those of one machine are neighbours of each other",
        "        if number in outgoing and before in outgoing and not barred((before, number)):\n",
        "        if False:\n",
    ),
    Mutant(
        "what goes around a blocked link does not make them neighbours",
        "            order = _cheaper(order, price)\n",
        "            order = _cheaper(order, cost)\n",
    ),
    Mutant(
        "who can be reached is sent nowhere",
        "    if not receiver.outgoing:\n",
        "    if False:\n",
    ),
    Mutant(
        "nobody is sent to a peer of another group, or one that is pending",
        "        if not self._membership.has(meet.peer, sender.group):\n",
        "        if meet.peer not in self._membership.peers:\n",
    ),
    Mutant(
        "a relay learns whom it joins",
        "    return [(relay, relaying), (receiver, come), (sender, m.Met(token, relay))]\n",
        "    return [(receiver, come), (sender, m.Met(token, relay))]\n",
    ),
    Mutant(
        "a collective that cannot be fails before it begins",
        "        if data is None and (why := self._meetings.broken(group.planned)):\n",
        "        if False:\n",
    ),
    Mutant(
        "a small collective needs no stream",
        "        if data is None and (why := self._meetings.broken(group.planned)):\n",
        "        if why := self._meetings.broken(group.planned):\n",
    ),
    Mutant(
        "a send that cannot be fails before it begins",
        "        if why := self._meetings.severed([round_.id.pair]):\n",
        '        if why := "":\n',
    ),
    Mutant(
        "nobody fetches from a holder with which it cannot meet",
        "            holders = tuple(one for one, why in whys.items() if not why)\n",
        "            holders = tuple(whys)\n",
    ),
    Mutant(
        "who relays makes it possible",
        "            if reach.apart(one, other) and not self.relays:\n",
        "            if reach.apart(one, other):\n",
    ),
    Mutant(
        "nobody dials who only dials out",
        "            if other.info.outgoing:  # which no dial can reach\n",
        "            if False:\n",
    ),
    Mutant(
        "who only dials out does not relay",
        "    if info.outgoing and info.relay:\n",
        "    if False:\n",
    ),
    Mutant(
        "links that cannot be are not measured",
        " or (reach.apart(one, other) and not relayed)\n",
        "\n",
    ),
    Mutant(
        "an associate fetches from nobody with whom it cannot meet",
        "        return not apart and ",
        "        return ",
    ),
    Mutant(
        "a loopback address leads to peers of the same machine only",
        "    return tuple(host for host in to.hosts if _confined(host) == near) or to.hosts\n",
        "    return to.hosts\n",
    ),
    Mutant(
        "each host of a newcomer is checked",
        "    for host in info.hosts:\n        if not HOST",
        "    for host in info.hosts[:1]:\n        if not HOST",
    ),
    Mutant(
        "those behind one NAT may reach each other where the master does not",
        "not all(local(info, other) or _behind_one(info, other) for other in group)\n",
        "not all(local(info, other) for other in group)\n",
    ),
    Mutant(
        "that the master lacks a way to an address proves nothing",
        "    if any(at == first or _same_for_all(at) for at in untried):\n",
        "    if False:\n",
    ),
    Mutant(
        "a peer is met at any of the sender's hosts",
        "sender.host, meet.port, lanes, sender.others))]\n",
        "sender.host, meet.port, lanes))]\n",
    ),
    Mutant(
        "two are met at any of the relay's hosts",
        "relay.host, relay.relay, lanes, relay.others)\n",
        "relay.host, relay.relay, lanes)\n",
    ),
    Mutant(
        "who has IPv4 alone and who has IPv6 alone are told so",
        "        foreign = all(reach.foreign(info(one), info(other)) for one, other in links)\n",
        "        foreign = False\n",
    ),
)
