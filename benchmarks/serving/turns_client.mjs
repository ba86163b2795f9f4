// The lone client of `turns_client.py` in JavaScript: `node turns_client.mjs FOLDER`, where FOLDER
// has node_modules with @grpc/grpc-js. It has one stream with one route at each server.

import { createRequire } from 'node:module';
import { join } from 'node:path';
import { performance } from 'node:perf_hooks';
import { createInterface } from 'node:readline';

const grpc = createRequire(join(process.argv[2], 'package.json'))('@grpc/grpc-js');

const JOIN = '/rlmesh.model.v1.ModelService/Join';
const asIs = (frame) => frame;
const encoded = (frames) => frames.map((frame) => frame.toString('base64'));
const say = (message) => process.stdout.write(`${JSON.stringify(message)}\n`);

function fail(text) {
  process.stdout.write(`${JSON.stringify({ error: text })}\n`, () => process.exit(1));
}

class Server {
  answers = [];
  #take = null;

  constructor({ address, openings, requests }) {
    const client = new grpc.Client(address, grpc.credentials.createInsecure());
    this.stream = client.makeBidiStreamRequest(JOIN, asIs, asIs);
    this.stream.on('data', (answer) => this.#take(answer));
    this.stream.on('error', ({ message }) => fail(`the server ended the stream: ${message}`));
    this.stream.on('end', () => fail('the server ended the stream'));
    [this.opening] = Object.values(openings).map((frame) => Buffer.from(frame, 'base64'));
    [this.request] = Object.values(requests).map((frame) => Buffer.from(frame, 'base64'));
  }

  ask(frame) {
    return new Promise((resolve) => {
      this.#take = resolve;
      this.stream.write(frame);
    });
  }

  async takeTurn(seconds) {
    const latenciesUs = [];
    const began = performance.now();
    let sent = began;
    while (sent < began + seconds * 1000) {
      const answer = await this.ask(this.request);
      const now = performance.now();
      latenciesUs.push(Math.round((now - sent) * 1000));
      this.answers.push(answer);
      sent = now;
    }
    return { seconds: (performance.now() - began) / 1000, latencies_us: latenciesUs };
  }
}

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const nextLine = async () => JSON.parse((await lines.next()).value);
const servers = (await nextLine()).servers.map((server) => new Server(server));
const opened = [];
for (const server of servers) opened.push(encoded([await server.ask(server.opening)]));
say({ opened });
for (let turn = await nextLine(); turn; turn = await nextLine()) {
  say(await servers[turn.server].takeTurn(turn.seconds));
}
say({ answers: servers.map(({ answers }) => encoded(answers)) });
process.stdin.on('close', () => process.exit(0));
