// An EnvService server: the gRPC shell round session.js.
//
//     node server.js --address 127.0.0.1:0 --num-envs 2

import { pathToFileURL } from 'node:url';
import { giveUp, load, parse } from './command_line.js';
import { EDITIONS, GENERATION, isOtherText, VERSION } from './edition.js';
import { Lanes } from './lanes.js';

const HELP = `Usage: node server.js [OPTIONS]

Serve an environment until Ctrl-C or SIGTERM. Prints a line of JSON with the address.

  --address HOST:PORT  port 0: a free one [default: 127.0.0.1:0]
  --num-envs N         lanes of each session [default: 2]
  --env FILE           a module whose default export is the environment's class [default: the probe]
  --validation MODE    warn, strict or off [default: warn]
  --help               show this message`;

const CAPABILITIES = {
  'rlmesh.env.service.v1': '', 'rlmesh.spaces.core.v1': '', 'rlmesh_ray.partial_reset.v1': '',
};

const { values: options } = parse(HELP, {
  options: {
    address: { type: 'string', default: '127.0.0.1:0' },
    'num-envs': { type: 'string', default: '2' },
    env: { type: 'string' },
    validation: { type: 'string', default: 'warn' },
  },
});
const numLanes = Number(options['num-envs']);
if (!(Number.isInteger(numLanes) && numLanes >= 1)) giveUp('--num-envs must be 1, 2, 3 …');
if (!['warn', 'strict', 'off'].includes(options.validation)) {
  giveUp('--validation must be warn, strict or off');
}
const { default: grpc } = await load('@grpc/grpc-js');
const { message, pack, toMetaMap } = await load('./wire.js');
const { Session } = await load('./session.js');
const probe = import.meta.resolve('./probe_env.js');
const module = options.env ? pathToFileURL(options.env).href : probe;
const { default: Environment } = await import(module).catch((error) => {
  giveUp(`cannot load ${options.env}: ${error.message}`);
});
const contract = {
  id: Environment.id,
  action_space: Environment.actionSpace.spec,
  observation_space: Environment.observationSpace.spec,
  metadata: toMetaMap(Environment.metadata),
  render_mode: Environment.renderMode,
  num_envs: numLanes,
  autoreset_mode: 'AUTORESET_MODE_NEXT_STEP',
};

function handshake({ protocol_generation: theirs, supported_workflow_editions: names, ...offer }) {
  const edition = EDITIONS.findLast(({ name }) => names.includes(name));
  const pin = offer.offered_edition_spec_sha256;
  let objection = '';
  if (theirs !== GENERATION) objection = `generation '${theirs}' is not '${GENERATION}'`;
  else if (!edition) objection = `no mutual workflow edition (offered: ${names.join(', ')})`;
  else if (isOtherText(edition, pin)) {
    objection = `edition ${edition.name} is provisional, and the peer means the text ${pin}`;
  }
  return {
    compatible: !objection,
    error_message: objection,
    server_protocol_generation: GENERATION,
    min_supported_protocol_generation: GENERATION,
    supported_workflow_editions: EDITIONS.map(({ name }) => name),
    server_version: VERSION,
    ...(!objection && {
      capabilities: CAPABILITIES,
      env_contract: contract,
      selected_workflow_edition: edition.name,
      selected_edition_spec_sha256: edition.sha256,
      selected_edition_status: edition.status,
    }),
  };
}

async function join(call) {
  call.sendMetadata(new grpc.Metadata()); // some clients wait for the headers before they send
  const lanes = new Lanes(module, numLanes);
  const session = new Session(Environment, lanes, numLanes, options.validation);
  const stop = () => lanes.stop('CRASHED', 'the client has gone');
  call.on('cancelled', stop);
  try {
    // One frame is taken, answered and written before the next one is taken.
    for await (const frame of call.iterator({ destroyOnReturn: false })) {
      const response = await session.answer(frame);
      await new Promise((resolve) => { call.write(response, resolve); });
      if (session.isClosed) break;
    }
  } catch (error) {
    if (!call.cancelled) console.error(error); // a client that has gone is no error
  }
  stop();
  call.end();
}

// Frames come and go as bytes: for one that is malformed gRPC would end the stream, whereas the
// session answers it.
const asIs = (bytes) => bytes;
const method = (name, isStream) => ({
  path: `/rlmesh.env.v1.EnvService/${name}`,
  requestStream: isStream,
  responseStream: isStream,
  requestSerialize: asIs,
  requestDeserialize: asIs,
  responseSerialize: asIs,
  responseDeserialize: asIs,
});

const unary = (name, answer) => ({ request: bytes }, respond) => {
  try {
    const request = message(`env.v1.${name}Request`).decode(bytes);
    respond(null, pack(message(`env.v1.${name}Response`), answer(request)));
  } catch (error) {
    respond({ code: grpc.status.INVALID_ARGUMENT, details: `${name}: ${error.message}` });
  }
};

const server = new grpc.Server({
  // A client that is frozen or out of reach must not keep its session.
  'grpc.keepalive_time_ms': 10_000,
  'grpc.keepalive_timeout_ms': 5_000,
});
server.addService(
  {
    Handshake: method('Handshake', false),
    Join: method('Join', true),
    Shutdown: method('Shutdown', false),
  },
  {
    Handshake: unary('Handshake', handshake),
    Join: join,
    Shutdown: unary('Shutdown', () => ({ message: 'remote shutdown is disabled here' })),
  },
);
server.bindAsync(options.address, grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) giveUp(`cannot listen on ${options.address}: ${error.message}; write HOST:PORT`);
  const host = options.address.slice(0, options.address.lastIndexOf(':'));
  console.log(JSON.stringify({ event: 'serving', address: `${host}:${port}` }));
});
for (const signal of ['SIGTERM', 'SIGINT']) process.on(signal, () => server.forceShutdown());
