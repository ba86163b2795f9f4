// A simulator that asks a served policy what to do: robots that balance a pole each, in lanes. It
// owns its loop; the policy only answers.
//
//     node drive_policy.js 127.0.0.1:5556 --routes 4 --lanes 8 --episodes 100
//
// Every robot has a route of its own, all on one connection and at once. Prints a line of JSON
// for each episode, and one for them all.

import { readFileSync } from 'node:fs';
import { performance } from 'node:perf_hooks';
import { parseArgs } from 'node:util';
import CartPole from './cart_pole.js';
import { PolicyClient } from './policy_client.js';

const USAGE = 'node drive_policy.js HOST:PORT [--routes 4] [--lanes 8] [--episodes 100] [--seed 0]'
  + ' [--token-file FILE]';
const PREDICT_OPTIONS = { timeoutMs: 10_000 };

function giveUp(message, code) {
  console.error(`error: ${message}`);
  process.exit(code);
}

function readArguments() {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      routes: { type: 'string', default: '4' },
      lanes: { type: 'string', default: '8' }, // of each route
      episodes: { type: 'string', default: '100' }, // in all
      seed: { type: 'string', default: '0' }, // of the first episode; the next one has the next
      'token-file': { type: 'string' }, // other users can read a command line
    },
  });
  if (positionals.length !== 1) throw new Error(`name one address: ${USAGE}`);
  const count = (name, least) => {
    const number = Number(values[name]);
    if (Number.isSafeInteger(number) && number >= least) return number;
    throw new Error(`--${name} must be ${least}, ${least + 1}, ${least + 2} …`);
  };
  const file = values['token-file'];
  return {
    address: positionals[0],
    numRoutes: count('routes', 1),
    numLanes: count('lanes', 1),
    numEpisodes: count('episodes', 1),
    seed: count('seed', 0),
    token: (file ? readFileSync(file, 'utf8').trim() : process.env.RLMESH_RAY_TOKEN) || undefined,
  };
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

async function main({ address, numRoutes, numLanes, numEpisodes, seed, token }) {
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
  const client = await PolicyClient.connect(address, { token });
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

let options;
try {
  options = readArguments();
} catch (error) {
  giveUp(error.message, 2);
}
try {
  await main(options);
} catch (error) {
  giveUp(`${options.address}: ${error.message} (${error.code ?? error.name})`, 1);
}
