"""The state of torch's CPU random generator, as torch.get_rng_state() gives it."""

from __future__ import annotations

import numpy as np

#: Bytes of the state: the legacy Mersenne Twister struct and the float sample.
#: Source: torch 2.13 aten/src/ATen/CPUGeneratorImpl.cpp, CPUGeneratorImplState.
TORCH_BYTES = 5056


def torch_state(seed: int) -> bytes:
    """What torch.manual_seed(seed); torch.get_rng_state() holds, for a CPU."""
    state = [seed & 0xFFFFFFFF]
    for i in range(1, 624):
        state.append((1812433253 * (state[-1] ^ (state[-1] >> 30)) + i) & 0xFFFFFFFF)
    head = np.zeros(TORCH_BYTES, np.uint8)
    head[0:8] = np.frombuffer(np.uint64(seed).tobytes(), np.uint8)
    head[8:12] = np.frombuffer(np.int32(1).tobytes(), np.uint8)  # left
    head[12:16] = np.frombuffer(np.int32(1).tobytes(), np.uint8)  # seeded
    head[24 : 24 + 624 * 8] = np.frombuffer(np.array(state, np.uint64).tobytes(), np.uint8)
    return head.tobytes()
