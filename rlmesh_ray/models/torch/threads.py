"""The number of torch's threads for a forward pass; importing this does not import torch."""

import sys
import threading
from typing import Any


def limit_torch_threads(count: int) -> None:
    """Have torch compute with ``count`` threads in the calling thread.

    Nothing happens where torch has not been imported. The libraries under torch keep the number
    for each thread, so ``torch.set_num_threads`` in another thread has no effect on this one.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    # This has also changed the default of new threads, which is restored here.
    restoring = threading.Thread(target=torch.set_num_threads, args=(before,))
    restoring.start()
    restoring.join()
