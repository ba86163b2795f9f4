from benchmarks.stepping.specs import CARTPOLE, FRAMES, ClientSpec, Mode, ServerSpec


def test_orders_come_out_as_they_went_in() -> None:
    client_spec = ClientSpec(
        Mode.SESSIONS, 0.1, 0.2, ("a", "a"), transport="shared_memory", num_envs=3
    )
    server_spec = ServerSpec(FRAMES, 8, {"step_s": 0.0}, is_socket=True)

    assert ClientSpec.from_line(client_spec.to_line()) == client_spec
    assert ServerSpec.from_line(server_spec.to_line()) == server_spec
    assert "\n" not in client_spec.to_line() + ServerSpec(CARTPOLE, 1).to_line()
