"""Mutants of the protocol of weights: associates, and what they follow."""

from __future__ import annotations

from mutations import Mutant

MUTANTS = [
    Mutant(
        "a holder has few places",
        "if self._taken(holder) < places]",
        "if self._taken(holder) < 1000]",
    ),
    Mutant(
        "for what is small a holder has more places",
        "return PLACES_SMALL if self.catalogue.size(key) < SMALL_BYTES else PLACES",
        "return PLACES",
    ),
    Mutant(
        "who is slow has no place at its holder",
        "sum(not self._all[number].slow for number in holder.receivers)",
        "sum(True for number in holder.receivers)",
    ),
    Mutant(
        "a receiver is not sent to holders that it avoids",
        "holder.info.peer not in one.seek.avoid",
        "True",
    ),
    Mutant(
        "who has fetched faster comes first",
        "key=lambda one: (one.slow, -one.rate)",
        "key=lambda one: (one.slow, one.rate)",
    ),
    Mutant(
        "the fastest of the free holders is taken",
        "best = max(fit, key=lambda",
        "best = min(fit, key=lambda",
    ),
    Mutant(
        "the receivers of a lost holder are sent elsewhere",
        "            self._wait_again(self._all[receiver])\n        del",
        "            pass\n        del",
    ),
    Mutant(
        "the receivers of what a holder drops are sent elsewhere",
        "                self._part(receiver)\n                self._wait_again(receiver)",
        "                pass",
    ),
    Mutant(
        "a lost associate holds nothing any more",
        "        for _ in self.catalogue.set(number, ()):\n            raise AssertionError",
        "        for _ in ():\n            raise AssertionError",
    ),
    Mutant(
        "a version is published once",
        "        if version <= head:\n            return f",
        "        if version < 0:\n            return f",
    ),
    Mutant(
        "the packages of a version lead to the same content",
        "        if len(names) < len(packages) or len(contents) > 1:\n",
        "        if False:\n",
    ),
    Mutant(
        "differences follow the newest version",
        "if any(package.base not in (0, head) for package in packages)",
        "if any(package.base < 0 for package in packages)",
    ),
    Mutant(
        "a publication that is said again is answered again",
        "        if all(self.catalogue.has(package, number) for package in packages):",
        "        if False:",
    ),
    Mutant(
        "another content of the same version is not offered",
        "return all(one.content == package.content for one in others)",
        "return True",
    ),
    Mutant(
        "what is held tells another master the newest version",
        "        self.catalogue.head = max(self.catalogue.head, holds.version)",
        "        pass",
    ),
    Mutant(
        "the status says which version an associate has",
        "        one.version = holds.version\n",
        "",
    ),
    Mutant(
        "associates are no peers",
        "        elif hello.associate:\n",
        "        elif False:\n",
    ),
    Mutant(
        "an associate that votes is dropped",
        '            self.drop(conn, f"it sent a {type(message).__name__} out of turn")',
        "            pass",
    ),
    Mutant(
        "an associate is known to a master that begins anew",
        "known = self.knows(conn) or self.run.associates.has(conn)",
        "known = self.knows(conn)",
    ),
    Mutant(
        "a connection that is lost may be that of an associate",
        "        self.run.associates.lose(conns, why)",
        "        pass",
    ),
    Mutant(
        "who comes late begins with a whole version",
        "if package.version <= version or not (package.base == 0 or package.base in cost)",
        "if package.version <= version or package.base not in cost",
    ),
    Mutant(
        "the way takes the fewest bytes",
        "total < cost.get(package.version, total + 1)",
        "package.version not in cost",
    ),
    Mutant(
        "a whole version is kept until there is another one",
        "(one.version < own if one.base == 0",
        "(one.version <= own if one.base == 0",
    ),
    Mutant(
        "a holder keeps no more than a message holds",
        "    oldest = max([oldest, *sorted(one.version for one in held)[:-KEPT_MAX]])\n",
        "",
    ),
    Mutant(
        "what is being fetched from a holder is not dropped",
        "if not self._held[one.key].receivers]",
        "if True]",
    ),
    Mutant(
        "a holder that gives other data is avoided",
        "                fetch.liars[fetch.holder] = None",
        "                pass",
    ),
    Mutant(
        "whom nobody honest gives the rest seeks something else",
        "return self.op != 0 and not self.liars",
        "return self.op != 0",
    ),
    Mutant(
        "a fetch that has failed is begun again",
        "            self._do(effects.Rest(why))",
        "            pass",
    ),
    Mutant(
        "what was taken is offered to others",
        "        if version and self._relays:",
        "        if False:",
    ),
    Mutant(
        "another master is told what is held",
        "        self._shelf.forget_receivers()  # an earlier master has sent them\n"
        "        self._say_holds()",
        "        self._shelf.forget_receivers()  # an earlier master has sent them",
    ),
    Mutant(
        "another master is told what is sought",
        "            fetch.liars.clear()  # its holders have other numbers now\n"
        "            self._seek(fetch)",
        "            fetch.liars.clear()  # its holders have other numbers now",
    ),
    Mutant(
        "another master is told what is being published",
        "            self._do(Send(m.Publish(call, packages)))\n        fetch = self._fetch",
        "            pass\n        fetch = self._fetch",
    ),
    Mutant(
        "a holder is told when a receiver needs nothing more",
        "            self._say(holder, m.Served(one.info.peer))",
        "            pass",
    ),
]
