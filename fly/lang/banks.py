"""A model of shared memory's banks, to tell good layouts from bad ones while a kernel is traced.

Which lanes the hardware serves together is not published for every access. `fly.emulator.banks` has what was measured
on AMD's; here lanes are taken in order on every target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def bank_conflicts(addresses: Sequence[int], access_bytes: int, banks: int = 32, bank_bytes: int = 4) -> int:
    """Passes that an access of `access_bytes` by lanes at these byte addresses takes beyond what it must.

    Lanes are served in order, as many at once as can fill every bank, one for each bank at most. A bank gives
    one word a pass, to every lane that wants it.
    """
    lanes = max(banks * bank_bytes // max(access_bytes, bank_bytes), 1)
    extra = 0
    for start in range(0, len(addresses), lanes):
        words = {
            (address + offset) // bank_bytes
            for address in addresses[start : start + lanes]
            for offset in range(access_bytes)
        }
        extra += max(Counter(word % banks for word in words).values()) - 1
    return extra
