"""The pictures of the live page in docs/: ``python -m benchmarks.watching.screenshots FOLDER``.

Of a real endpoint whose session steps, a policy, a training's curve and a recording, in light and
dark, at the widths of a desk and of a phone.
"""

import contextlib
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.watching.browsing import browser, served
from benchmarks.watching.cart_pole import DrawnCartPole
from benchmarks.watching.samples import balanced, record, write_progress

SIZES = {"desk": (1280, 1080), "phone": (390, 844)}


def main(target: Path) -> None:
    """Write ``watch_desk_light.png`` and so on."""
    from rlmesh_ray.client.channel import ConnectOptions
    from rlmesh_ray.watch.live import AddressSource, LiveView, WatchedAddress
    from rlmesh_ray.watch.page import page
    from rlmesh_ray.watch.runs import RunFolder

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "runs"
        write_progress(folder / "CartPole-v1-PPO", 60)
        record(folder / "evaluation", 4)
        addresses = stack.enter_context(played())
        source = AddressSource([WatchedAddress(ConnectOptions(each)) for each in addresses])
        url = stack.enter_context(served(page(LiveView(source), RunFolder(folder))))
        started = stack.enter_context(browser())
        for name, (width, height) in SIZES.items():
            context = started.new_context(viewport={"width": width, "height": height})
            view = context.new_page()
            view.goto(url)
            view.get_by_text("pictures a second; at most").wait_for()
            view.get_by_role("button", name="Replay episode").first.click()
            view.get_by_role("img", name="return so far over step").wait_for()
            view.evaluate("document.getElementById('video').currentTime = 0.3")
            view.wait_for_timeout(5000)  # two statistics give rates; the video is loaded
            view.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
            for scheme in ("light", "dark"):
                view.emulate_media(color_scheme=scheme)
                path = target / f"watch_{name}_{scheme}.png"
                view.screenshot(path=path, full_page=name == "desk")
            context.close()


@contextlib.contextmanager
def played() -> Iterator[list[str]]:
    """Serve an environment and a policy that steps it; yield their addresses."""
    from rlmesh_ray import EnvServer, ModelServer, RemoteModel, RemoteVectorEnv

    is_over = threading.Event()

    def play(envs: RemoteVectorEnv, model: RemoteModel) -> None:
        observations, _ = envs.reset(seed=1)
        while not is_over.wait(0.002):
            observations, *_ = envs.step(model.predict(observations))

    with (
        EnvServer(DrawnCartPole, num_envs=8) as env_server,
        ModelServer(Balancing()) as model_server,
        RemoteModel(model_server.address) as model,
    ):
        envs = RemoteVectorEnv(env_server.address)
        model.configure_route(envs)
        thread = threading.Thread(target=play, args=[envs, model])
        thread.start()
        try:
            yield [env_server.address, model_server.address]
        finally:
            is_over.set()
            thread.join(20.0)
            envs.close()


class Balancing:
    """Pushes the cart below the pole's tip."""

    def __call__(self, observations: Any) -> Any:
        """Return an action for each row."""
        return balanced(observations)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
