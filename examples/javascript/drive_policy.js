// A simulator that asks a served policy what to do: robots that balance a pole each, in lanes. It
// owns its loop; the policy only answers.
//
//     node drive_policy.js 127.0.0.1:5556 --routes 4 --lanes 8 --episodes 100
//
// Every robot has a route of its own, all on one connection and at once.

import { readFileSync } from 'node:fs';
import { performance } from 'node:perf_hooks';
import CartPole from './cart_pole.js';
import { giveUp, load, parse } from './command_line.js';

const HELP = `Usage: node drive_policy.js [OPTIONS] HOST:PORT

Let robots that balance poles ask the policy at HOST:PORT (or unix:PATH) for their actions. Prints
a line of JSON for each episode, and one for them all.

  --routes N         robots; each has a route of its own [default: 4]
  --lanes N          poles of each robot [default: 8]
  --episodes N       episodes of all robots together [default: 100]
  --seed N           seed of the first episode; episode i starts with seed + i [default: 0]
  --token-file FILE  the endpoint's token, one a line [default: the token in RLMESH_RAY_TOKEN]
  --tls-ca FILE      use TLS; the authority that signed the endpoint's certificate (PEM)
  --help             show this message

The exit code is 0, 1 if the endpoint cannot be used, or 2 if the command line is wrong.`;
const PREDICT_OPTIONS = { timeoutMs: 10_000 };

function readArguments() {
  const { values, positionals } = parse(HELP, {
    allowPositionals: true,
    options: {
      routes: { type: 'string', default: '4' },
      lanes: { type: 'string', default: '8' },
      episodes: { type: 'string', default: '100' },
      seed: { type: 'string', default: '0' },
      'token-file': { type: 'string' }, // other users can read a command line
      'tls-ca': { type: 'string' },
    },
  });
  if (positionals.length !== 1) giveUp('name one address, HOST:PORT; --help shows the options');
  const count = (name, least) => {
    const number = Number(values[name]);
    if (Number.isSafeInteger(number) && number >= least) return number;
    return giveUp(`--${name} must be ${least}, ${least + 1}, ${least + 2} …`);
  };
  return {
    address: positionals[0],
    numRoutes: count('routes', 1),
    numLanes: count('lanes', 1),
    numEpisodes: count('episodes', 1),
    seed: count('seed', 0),
    token: readToken(values['token-file']),
    tlsCa: values['tls-ca'],
  };
}

// The token that a client of rlmesh-ray would take from the file: the first without the role probe.
function readToken(file) {
  if (file === undefined) return process.env.RLMESH_RAY_TOKEN?.trim() || undefined;
  let content;
  try {
    content = readFileSync(file, 'utf8');
  } catch (error) {
    const remedy = "name the file that holds the endpoint's token";
    giveUp(`cannot read the token file ${file} (${error.message}); ${remedy}`);
  }
  const entries = content.split('\n').map((line) => line.trim().split(/\s+/))
    .filter(([token]) => token && !token.startsWith('#'));
  const [token] = entries.find(([, role]) => role !== 'probe') ?? entries[0] ?? [];
  return token ?? giveUp(`the token file ${file} is empty; write the endpoint's token into it`);
}

// The episode that runs in a lane.
class Episode {
  #env = new CartPole();
  #return = 0;

  constructor(routeId, lane, index, seed) {
    Object.assign(this, { routeId, lane, index, seed, length: 0, isOver: false });
    this.observation = this.#env.reset(seed).observation;
  }

  // Identifies the episode of the observation, so that the policy can remember it.
  get slot() {
    const { lane, routeId, index, length } = this;
    return {
      env_index: lane, episode_id: `${routeId}/${index}`, step: length, reset: length === 0,
    };
  }

  step(action) {
    const { observation, reward, terminated, truncated } = this.#env.step(action);
    this.observation = observation;
    this.length += 1;
    this.#return += reward;
    this.isOver = terminated || truncated;
    this.isTerminated = terminated;
  }

  // In the words of `rlmesh-ray evaluate --json`.
  get record() {
    const { index, seed, routeId: route, lane, length, isTerminated: terminated } = this;
    return {
      event: 'episode', index, seed, route, lane, episode_return: this.#return, length, terminated,
    };
  }
}

// The lanes of one robot, asked about as one batch, until `begin` has no further episode for them.
async function drive(client, routeId, numLanes, begin, note) {
  const { id, actionSpace, observationSpace } = CartPole;
  await client.configureRoute(routeId, { id, actionSpace, observationSpace, numLanes });
  let episodes = Array.from({ length: numLanes }, (_, lane) => begin(routeId, lane));
  for (;;) {
    episodes = episodes.filter(Boolean); // a lane without an episode is not in the batch
    if (!episodes.length) break;
    const observations = episodes.map(({ observation }) => observation);
    const slots = episodes.map(({ slot }) => slot);
    const asked = performance.now();
    const answer = await client.predict(routeId, observations, slots, PREDICT_OPTIONS);
    const { actions, telemetry } = answer;
    note(performance.now() - asked, telemetry);
    episodes = episodes.map((episode, row) => {
      episode.step(actions[row]);
      if (!episode.isOver) return episode;
      const version = telemetry && { policy_version: telemetry.policyVersion };
      console.log(JSON.stringify({ ...episode.record, ...version }));
      return begin(routeId, episode.lane);
    });
  }
  await client.closeRoute(routeId);
}

const round = (number) => Number(number.toFixed(3));
const mean = (numbers) => numbers.reduce((sum, number) => sum + number, 0) / numbers.length;

function percentile(numbers, share) {
  const sorted = numbers.toSorted((one, other) => one - other);
  return round(sorted[Math.ceil(share * sorted.length) - 1]);
}

async function main({ address, numRoutes, numLanes, numEpisodes, seed, ...security }) {
  const begun = [];
  const begin = (routeId, lane) => {
    const index = begun.length;
    if (index === numEpisodes) return null;
    begun.push(new Episode(routeId, lane, index, seed + index));
    return begun[index];
  };
  const roundTrips = [];
  const measured = [];
  const note = (roundTripMs, telemetry) => {
    roundTrips.push(roundTripMs);
    if (telemetry) measured.push(telemetry);
  };
  const started = performance.now();
  const client = await PolicyClient.connect(address, security);
  try {
    const robots = Array.from({ length: numRoutes }, (_, i) => `robot-${i}`);
    await Promise.all(robots.map((id) => drive(client, id, numLanes, begin, note)));
  } finally {
    await client.close();
  }
  const versions = measured.map(({ policyVersion }) => policyVersion);
  console.log(JSON.stringify({
    event: 'result',
    return_mean: round(mean(begun.map(({ record }) => record.episode_return))),
    episodes: begun.length,
    env_steps: begun.reduce((sum, { length }) => sum + length, 0),
    predictions: roundTrips.length,
    round_trip_ms: { p50: percentile(roundTrips, 0.5), p99: percentile(roundTrips, 0.99) },
    ...(measured.length && {
      policy_versions: [...new Set(versions)],
      queue_ms_p50: percentile(measured.map(({ queueMs }) => queueMs), 0.5),
      forward_ms_p50: percentile(measured.map(({ forwardMs }) => forwardMs), 0.5),
    }),
    wall_s: round((performance.now() - started) / 1000),
  }));
}

process.noDeprecation = true; // gRPC's library has TLS name an IP address, and Node warns of that
const options = readArguments();
const { PolicyClient } = await load('./policy_client.js');
const { checkAddress, checkToken, readTlsCa } = await load('./policy_arguments.js');
try {
  checkAddress(options.address);
  if (options.token !== undefined) checkToken(options.token);
  if (options.tlsCa !== undefined) readTlsCa(options.tlsCa);
} catch (error) {
  giveUp(error.message);
}
try {
  await main(options);
} catch (error) {
  giveUp(`${options.address}: ${error.message} (${error.code ?? error.name})`, 1);
}
