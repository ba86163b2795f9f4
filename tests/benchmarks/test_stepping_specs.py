from benchmarks.stepping.specs import CARTPOLE, FRAMES, Drive, Hosting, Way


def test_orders_come_out_as_they_went_in() -> None:
    drive = Drive(Way.SESSIONS, 0.1, 0.2, ("a", "a"), transport="shared_memory", num_envs=3)
    hosting = Hosting(FRAMES, 8, {"step_s": 0.0}, is_socket=True)

    assert Drive.from_line(drive.to_line()) == drive
    assert Hosting.from_line(hosting.to_line()) == hosting
    assert "\n" not in drive.to_line() + Hosting(CARTPOLE, 1).to_line()
