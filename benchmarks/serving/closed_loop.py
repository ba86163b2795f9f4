"""Every route asks again as soon as it has its answer: what a server can do at most."""

from benchmarks.serving.streams import Stream, Tally, now_s


async def ask_by_turns(stream: Stream, rows: int, tally: Tally) -> None:
    """Keep one request of each of the stream's routes in flight, until cancelled.

    Raises:
        BadAnswerError: An answer was no prediction.
    """
    # A route has one request at a time: its name serves as the id of all of them.
    frames = {route: stream.dialect.request(route, rows, route) for route in stream.routes}
    sent_s = {}
    for route, frame in frames.items():
        sent_s[route] = now_s()
        await stream.write(frame)
    while True:
        route = await stream.predicted()
        answered_s = now_s()
        tally.latencies_us.append(round((answered_s - sent_s[route]) * 1e6))
        sent_s[route] = answered_s
        await stream.write(frames[route])
