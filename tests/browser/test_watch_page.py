"""The live page in a real browser: what can be seen, clicked, typed and heard."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

from benchmarks.watching.browsing import browser, lacking, served
from benchmarks.watching.cart_pole import DrawnCartPole
from benchmarks.watching.samples import ManyEndpoints, record, write_progress, write_recording
from rlmesh_ray import EnvServer, RemoteVectorEnv
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.server.observe.endpoint_status import EndpointStatus
from rlmesh_ray.watch.live import AddressSource, LiveView, WatchedAddress
from rlmesh_ray.watch.page import page
from rlmesh_ray.watch.runs import RunFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(lacking()), reason=f"needs {lacking()}"),
]
TOKEN = "a token for tests"
WIDTHS = {"phone": 390, "desk": 1280}


@pytest.fixture(name="chromium", scope="module")
def _chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_progress(folder / "cart", 30)
    write_recording(folder / "kept", 120)
    record(folder / "real", 1)
    return folder


@contextlib.contextmanager
def opened(chromium: Any, app: Any, width: int = 1280, **options: Any) -> Iterator[Any]:
    """Yield the page in a window of its own; errors of its script fail the test."""
    errors: list[str] = []
    with (
        served(app) as url,
        contextlib.closing(
            chromium.new_context(viewport={"width": width, "height": 900}, **options)
        ) as context,
    ):
        view = context.new_page()
        view.set_default_timeout(20_000)
        view.on("pageerror", lambda error: errors.append(str(error)))
        view.goto(url)
        yield view
    assert errors == []


def many(folder: Path, token: str | None = None) -> Any:
    return page(LiveView(ManyEndpoints(100)), RunFolder(folder), token)


@pytest.fixture(name="stepping", scope="module")
def _stepping() -> Iterator[EnvServer]:
    """An endpoint with an open session, which steps all the time."""
    is_over = threading.Event()

    def step(envs: RemoteVectorEnv) -> None:
        while not is_over.wait(0.002):
            envs.step(np.array([0, 1]))

    # Small pictures take little, so that even on busy cores the next one comes soon.
    with EnvServer(DrawnCartPole, num_envs=2, env_kwargs={"scale": 0.1}) as server:
        envs = RemoteVectorEnv(server.address)
        envs.reset(seed=1)
        thread = threading.Thread(target=step, args=[envs])
        thread.start()
        try:
            yield server
        finally:
            is_over.set()
            thread.join(20.0)
            envs.close()


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_nothing_is_wider_than_the_window(width: int, chromium: Any, folder: Path) -> None:
    with opened(chromium, many(folder), width) as view:
        view.get_by_role("button", name="Watch hills/0").wait_for()

        assert view.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_every_control_and_every_region_has_a_name(width: int, chromium: Any, folder: Path) -> None:
    with opened(chromium, many(folder), width) as view:
        for name in ("Live", "Training", "Environments", "Policies", "Recorded episodes"):
            view.get_by_role("region", name=name).wait_for()
            view.get_by_role("heading", name=name, exact=True).wait_for()
        for name in ("Session", "Lane", "Run", "Recording", "Order"):
            view.get_by_role("combobox", name=name, exact=True).wait_for()
        for name, row in (("Environments", "hills/0"), ("Policies", "hills/9")):
            table = view.get_by_role("table", name=name)
            table.get_by_role("row").filter(has_text=row).first.wait_for()
        view.get_by_role("img", name="mean return over env steps").wait_for()
        unnamed = view.locator("button, select, input, img:visible, video:visible").evaluate_all(
            "all => all.filter(e => !(e.labels?.length || e.textContent.trim() || e.alt || "
            "e.getAttribute('aria-label'))).length"
        )
        assert unnamed == 0


def test_a_training_that_cannot_be_read_hides_no_recording(chromium: Any, tmp_path: Path) -> None:
    write_progress(tmp_path / "cart", 1)
    (tmp_path / "cart" / "progress.csv").write_bytes(b"env_steps\n\xff\n")
    write_recording(tmp_path / "kept", 3)
    with opened(chromium, many(tmp_path)) as view:
        view.get_by_role("button", name="Replay episode 000002").wait_for()

        # Both are said as long as both hold.
        view.get_by_role("status").get_by_text("100 endpoints; ").wait_for()


def test_states_are_words_and_trouble_says_what_it_is(chromium: Any, folder: Path) -> None:
    with opened(chromium, many(folder)) as view:
        rows = view.get_by_role("table", name="Environments").get_by_role("row")
        stale = rows.filter(has=view.get_by_role("button", name="Watch hills/1", exact=True))

        stale.get_by_text("stale").wait_for()
        stale.get_by_text("nothing answers there").wait_for()
        assert "many endpoints: 100 endpoints" in view.get_by_role("status").inner_text()


class BehindAGateway(ManyEndpoints):
    """Three endpoints, and a gateway that comes first."""

    def endpoints(self) -> list[EndpointStatus]:
        found = super().endpoints()
        fleet = "gateway/hills"
        return [replace(found[0], fleet=fleet, endpoint_id=f"{fleet}/0", sighting=None), *found]


def test_gateways_have_a_table_of_their_own_and_an_environment_is_chosen(
    chromium: Any, folder: Path
) -> None:
    with opened(chromium, page(LiveView(BehindAGateway(3)), RunFolder(folder))) as view:
        view.get_by_role("region", name="Live").get_by_text("hills/0", exact=True).wait_for()
        gateways = view.get_by_role("region", name="Gateways")

        gateways.get_by_role("button", name="Show gateway/hills/0").click()

        view.get_by_text("A gateway has no lanes to show.").wait_for()


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_a_runner_leads_to_an_environment_that_it_steps(
    width: int, chromium: Any, folder: Path
) -> None:
    with opened(chromium, many(folder), width) as view:
        row = view.get_by_role("region", name="Env runners").get_by_role("row").nth(2)
        assert row.inner_text().split("\t")[1:3] == ["4", "hills/3, hills/5"]
        row.get_by_role("button", name="Show an environment of training runner 1").click()

        view.get_by_role("region", name="Live").get_by_text("hills/3", exact=True).wait_for()
        assert view.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_a_policy_says_why_it_runs_in_torch(width: int, chromium: Any, folder: Path) -> None:
    with opened(chromium, many(folder), width) as view:
        view.get_by_role("button", name="Show hills/9").first.click()

        view.get_by_text('torch: inference="torch" says so').wait_for()
        assert view.evaluate("document.documentElement.scrollWidth") <= width


def test_a_focused_episode_stays_while_newer_ones_come_before_it(
    chromium: Any, tmp_path: Path
) -> None:
    write_recording(tmp_path / "kept", 3)
    with opened(chromium, many(tmp_path)) as view:
        view.get_by_role("button", name="Replay episode 000002").focus()
        write_recording(tmp_path / "kept", 5)
        view.get_by_role("button", name="Replay episode 000004").wait_for()

        focused = view.evaluate("document.activeElement.getAttribute('aria-label')")
        assert focused == "Replay episode 000002"
        rows = view.locator("#episodes tbody tr button").all_inner_texts()
        assert rows == ["000004", "000003", "000002", "000001", "000000"]


def test_a_lane_is_seen_live_with_the_rate_that_the_page_names(
    chromium: Any, stepping: EnvServer, folder: Path
) -> None:
    target = WatchedAddress(ConnectOptions(stepping.address))
    app = page(LiveView(AddressSource([target])), RunFolder(folder))
    with opened(chromium, app) as view:
        picture = view.get_by_role("img", name="Lane 0 of session")
        picture.wait_for()
        view.get_by_text("at most 5 a second and 1 % of the session's time").wait_for()
        assert picture.evaluate("image => image.naturalWidth") == 60

        view.get_by_role("combobox", name="Lane").select_option("1")

        view.get_by_role("img", name="Lane 1 of session").wait_for()


def test_the_keyboard_reaches_an_endpoint_and_keeps_its_place(chromium: Any, folder: Path) -> None:
    with opened(chromium, many(folder)) as view:
        button = view.get_by_role("button", name="Watch hills/3", exact=True)
        button.focus()
        view.keyboard.press("Enter")
        view.get_by_role("region", name="Live").get_by_text("hills/3", exact=True).wait_for()
        with view.expect_response("**/api/endpoints*"):
            pass

        assert view.evaluate("document.activeElement.getAttribute('aria-label')") == "Watch hills/3"
        assert button.get_attribute("aria-pressed") == "true"
        view.keyboard.press("Tab")
        assert view.evaluate("document.activeElement.getAttribute('aria-label')") == "Watch hills/4"


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_an_episode_is_replayed_after_a_click_in_any_order_and_page(
    width: int, chromium: Any, folder: Path
) -> None:
    with opened(chromium, many(folder), width) as view:
        view.get_by_role("combobox", name="Order").select_option("highest")
        view.get_by_role("button", name="Replay episode 000119").click()

        replay = view.get_by_role("region", name="Episode 000119")
        replay.get_by_text("129", exact=True).first.wait_for()
        assert view.evaluate("document.activeElement.textContent") == "Episode 000119"
        view.get_by_role("button", name="Next").click()
        view.get_by_text("51 to 100 of 120").wait_for()
        view.get_by_role("button", name="Previous").click()
        view.get_by_text("1 to 50 of 120").wait_for()


def test_a_recorded_episode_is_played_with_its_growing_return(chromium: Any, folder: Path) -> None:
    with opened(chromium, many(folder)) as view:
        view.get_by_role("button", name="Replay episode").first.wait_for()
        num_stale = view.get_by_role("combobox", name="Recording").evaluate(
            "box => { box.value = 'real'; box.dispatchEvent(new Event('change'));"
            " return document.querySelectorAll('#episodes tbody tr').length; }"
        )
        assert num_stale == 0
        view.get_by_role("button", name="Replay episode").first.click()

        view.get_by_role("img", name="return so far over step").wait_for()
        video = view.locator("#video")
        assert "Video of episode" in str(video.get_attribute("aria-label"))
        video.evaluate(
            "video => new Promise(done => video.readyState > 1 ? done() : "
            "video.addEventListener('loadeddata', done))"
        )
        assert video.evaluate("video => video.videoWidth") == 300


def test_a_page_with_a_token_asks_for_it_once(chromium: Any, folder: Path) -> None:
    with opened(chromium, many(folder, TOKEN)) as view:
        field = view.get_by_label("Token of this page")
        field.wait_for()
        assert view.evaluate("document.activeElement.id") == "token"
        field.fill("wrong")
        view.keyboard.press("Enter")
        view.get_by_role("alert").get_by_text("not the page's").wait_for()
        field.fill(TOKEN)
        view.get_by_role("button", name="Open").click()
        view.get_by_role("button", name="Watch hills/0").wait_for()

        view.reload()

        view.get_by_role("button", name="Watch hills/0").wait_for()
        assert not field.is_visible()


def test_a_link_with_the_token_opens_the_page_and_hides_the_token(
    chromium: Any, folder: Path
) -> None:
    with opened(chromium, many(folder, TOKEN)) as view:
        view.get_by_label("Token of this page").wait_for()
        bare = view.url

        view.goto("about:blank")
        view.goto(f"{bare}#{urlencode({'token': TOKEN})}")

        view.get_by_role("button", name="Watch hills/0").wait_for()
        assert view.url == bare


def test_a_server_that_goes_and_comes_back_is_noticed(chromium: Any, folder: Path) -> None:
    with opened(chromium, many(folder)) as view:
        view.get_by_role("button", name="Watch hills/0").wait_for()
        view.route("**/api/**", lambda route: route.abort())
        view.get_by_role("status").get_by_text("no connection").wait_for()
        view.locator("main.old").wait_for()
        view.unroute("**/api/**")

        view.get_by_role("status").get_by_text("100 endpoints", exact=False).wait_for()
        view.locator("main:not(.old)").wait_for()


class Leaving(ManyEndpoints):
    """Endpoints that may all leave."""

    are_gone = False

    def endpoints(self) -> list[EndpointStatus]:
        return [] if self.are_gone else super().endpoints()


def test_nothing_is_left_of_an_endpoint_that_was_shown_and_has_left(
    chromium: Any, folder: Path
) -> None:
    source = Leaving(3)
    with opened(chromium, page(LiveView(source), RunFolder(folder))) as view:
        live = view.get_by_role("region", name="Live")
        live.get_by_text("hills/0", exact=True).wait_for()

        source.are_gone = True

        live.get_by_text("Choose an environment to see its lanes.").wait_for()
        live.get_by_text("hills/0", exact=True).wait_for(state="detached")
