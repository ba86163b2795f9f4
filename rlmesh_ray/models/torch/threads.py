"""How many threads torch uses for a forward pass; importing this does not import torch."""

import sys
import threading
from typing import Any


def limit_torch_threads(count: int) -> None:
    """Have torch compute with ``count`` threads whatever the calling thread asks of it.

    Nothing happens where torch has not been imported. ``torch.set_num_threads`` alone does not do
    it: the libraries under torch keep the number thread by thread, so that one that is set
    elsewhere does not reach the thread that computes.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    # This has also become what new threads begin with, which is not this function's business.
    restoring = threading.Thread(target=torch.set_num_threads, args=(before,))
    restoring.start()
    restoring.join()
