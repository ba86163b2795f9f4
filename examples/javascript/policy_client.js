// A client of rlmesh.model.v1.ModelService: a session with a served policy.
//
//     const client = await PolicyClient.connect('127.0.0.1:5556');
//     await client.configureRoute('robot', { id, actionSpace, observationSpace, numLanes: 2 });
//     const slots = [{ env_index: 0, episode_id: 'a', step: 0, reset: true }];
//     const { actions } = await client.predict('robot', [observation], slots);
//     await client.close();
//
// Nothing needs to be awaited before the next request is sent: requests of one route take effect
// in the order of the calls, those of different routes do not wait for each other. A request that
// fails rejects the promise of its own call, with a PolicyError or, for a value that is not of its
// space and for a slot that names no lane, with a ConformanceError. `timeoutMs` may be Infinity.

import { randomUUID } from 'node:crypto';
import grpc from '@grpc/grpc-js';
import { conform, packBatch, unpackBatch } from './conformance.js';
import {
  checkAddress, checkContract, checkCredentials, checkSlots, checkTimeout, checkToken,
} from './policy_arguments.js';
import { lost, PolicyError, refusal } from './policy_errors.js';
import { asIs, SERVICE, shakeHands } from './policy_handshake.js';
import { message, pack } from './wire.js';

const SESSION_CAPABILITY = 'rlmesh_ray.session.v1'; // the session's id, to be shown at Join
const SESSION_METADATA_KEY = 'rlmesh-ray-session';
const CLOSE_TIMEOUT_MS = 2_000;

const JoinRequest = message('model.v1.JoinRequest');
const JoinResponse = message('model.v1.JoinResponse');

const OPTIONS = {
  // A server that is frozen or out of reach must not keep its clients waiting.
  'grpc.keepalive_time_ms': 10_000,
  'grpc.keepalive_timeout_ms': 5_000,
  'grpc.enable_retries': 0, // a policy with a memory must see no observation twice
  'grpc.max_receive_message_length': -1,
  'grpc.use_local_subchannel_pool': 1, // a connection a client
};

export class PolicyClient {
  #channel;
  #stream;
  #sessionId;
  #contracts = new Map(); // by route
  #outstanding = new Map(); // by request id
  #lastId = 0;
  #failure = null; // after it nothing can be asked
  #end = null; // after it only Close can be asked

  // `address` is HOST:PORT or unix:PATH, `token` the endpoint's token. `tlsCa` turns TLS on: the
  // path of a PEM file with the authority that signed the endpoint's certificate. Where the endpoint
  // wants a certificate of its clients, give `credentials` from grpc.credentials.createSsl instead.
  static async connect(address, options = {}) {
    const { token, timeoutMs = 10_000, tlsCa, credentials } = options;
    const usesTls = tlsCa !== undefined || credentials !== undefined;
    const target = checkAddress(address);
    const timerMs = checkTimeout(timeoutMs);
    const metadata = new grpc.Metadata();
    if (token !== undefined) metadata.set('authorization', `Bearer ${checkToken(token)}`);
    const channel = new grpc.Client(target, checkCredentials(tlsCa, credentials), OPTIONS);
    try {
      const answer = await shakeHands(channel, metadata, timerMs, usesTls);
      const givenId = answer.capabilities[SESSION_CAPABILITY];
      if (givenId) metadata.set(SESSION_METADATA_KEY, givenId);
      return new PolicyClient(channel, metadata, givenId || randomUUID());
    } catch (error) {
      channel.close();
      throw error;
    }
  }

  // Not to be called: `connect` does.
  constructor(channel, metadata, sessionId) {
    this.#channel = channel;
    this.#sessionId = sessionId;
    this.#stream = channel.makeBidiStreamRequest(`/${SERVICE}/Join`, asIs, asIs, metadata);
    this.#stream.on('data', (frame) => this.#receive(frame));
    this.#stream.on('error', () => {}); // 'status' says the same, also of an orderly end
    this.#stream.on('status', (status) => this.#fail(lost(status)));
  }

  // Opens a route for environments of one kind. A contract has an `id`, an `actionSpace` and an
  // `observationSpace` (spaces.js) and `numLanes`. Rejects if the policy cannot act there.
  async configureRoute(routeId, contract, { timeoutMs = 60_000 } = {}) {
    const timerMs = checkTimeout(timeoutMs);
    checkContract(contract);
    const before = this.#contracts.get(routeId);
    const env_contract = {
      id: contract.id,
      action_space: contract.actionSpace.spec,
      observation_space: contract.observationSpace.spec,
      num_envs: contract.numLanes,
      autoreset_mode: 'AUTORESET_MODE_DISABLED',
    };
    this.#contracts.set(routeId, contract); // for what is sent before the answer
    try {
      const request = { context: { route_id: routeId }, env_contract };
      await this.#ask('configure_route', request, timerMs);
    } catch (error) {
      if (this.#contracts.get(routeId) === contract) this.#contracts.set(routeId, before);
      throw error;
    }
  }

  // Asks for an action for each observation; the observation in row i is that of slots[i], a
  // PredictSlot as in proto/. Resolves to { actions, telemetry }, with the values that spaces.js
  // describes, and what the server has measured: { policyVersion, queueMs, forwardMs, batchRows },
  // or null. After `timeoutMs` it rejects, and a later answer is ignored.
  async predict(routeId, observations, slots, { timeoutMs = 60_000 } = {}) {
    const timerMs = checkTimeout(timeoutMs);
    const contract = this.#contracts.get(routeId);
    if (!contract) {
      throw new PolicyError('NOT_CONFIGURED', `route '${routeId}' is not configured`, {
        isRecoverable: true,
      });
    }
    const { observationSpace, actionSpace } = contract;
    checkSlots(slots);
    const values = observations.map((value) => conformed(observationSpace, value, 'observation'));
    const data = packBatch(observationSpace, values);
    const request = { context: { route_id: routeId, slots }, observation: { bytes: { data } } };
    const { predict, telemetry } = await this.#ask('predict', request, timerMs);
    const bytes = predict.action?.bytes?.data ?? Buffer.alloc(0);
    const actions = unpackBatch(actionSpace, bytes, slots.length, 'action').map((value) =>
      conformed(actionSpace, value, 'action'));
    return { actions, telemetry: telemetry ? measured(telemetry) : null };
  }

  // Releases a route, with what the policy remembers of its episodes.
  async closeRoute(routeId, { timeoutMs = 60_000 } = {}) {
    const timerMs = checkTimeout(timeoutMs);
    this.#contracts.delete(routeId);
    await this.#ask('close_route', { context: { route_id: routeId } }, timerMs);
  }

  // Ends the session, after everything outstanding; not the service. May be called again.
  async close() {
    await this.#ask('close', {}, CLOSE_TIMEOUT_MS).catch(() => {}); // it ends in any case
    this.#fail(new PolicyError('CLOSED', 'the session is closed'));
    this.#stream.cancel();
    this.#channel.close();
  }

  async #ask(kind, fields, timerMs) {
    if (this.#failure) throw this.#failure;
    if (this.#end && kind !== 'close') throw this.#end;
    this.#lastId += 1;
    const id = String(this.#lastId);
    const own = { session_id: this.#sessionId, request_id: id };
    const context = fields.context && { ...fields.context, ...own };
    const frame = pack(JoinRequest, { request_id: id, [kind]: { ...fields, context } });
    return new Promise((resolve, reject) => {
      const giveUp = () => {
        this.#outstanding.delete(id);
        const text = `no answer within ${timerMs} ms`;
        reject(new PolicyError('TIMEOUT', text, { isRecoverable: true }));
      };
      this.#outstanding.set(id, { kind, resolve, reject, timer: setTimeout(giveUp, timerMs) });
      this.#stream.write(frame);
    });
  }

  #receive(frame) {
    let response;
    try {
      response = JoinResponse.decode(frame);
    } catch (error) {
      this.#fail(new PolicyError('MALFORMED', `the answer is no JoinResponse: ${error.message}`));
      this.#stream.cancel();
      return;
    }
    const request = this.#outstanding.get(response.request_id);
    if (!request) return; // it came too late
    this.#outstanding.delete(response.request_id);
    clearTimeout(request.timer);
    if (response.kind === request.kind) {
      request.resolve(response);
      return;
    }
    const error = refusal(request.kind, response);
    if (!error.isRecoverable) this.#end ??= error;
    request.reject(error);
  }

  #fail(failure) {
    this.#failure ??= failure;
    for (const { reject, timer } of this.#outstanding.values()) {
      clearTimeout(timer);
      reject(this.#failure);
    }
    this.#outstanding.clear();
  }
}

const conformed = (space, value, path) => conform(space, value, path, () => {});

function measured({ metrics }) {
  const numbers = Object.fromEntries(metrics.map((metric) => [metric.name, metric]));
  const milliseconds = (name) => Number(numbers[name]?.duration_ns ?? NaN) / 1e6;
  return {
    policyVersion: numbers['policy.version']?.number,
    queueMs: milliseconds('predict.queue'),
    forwardMs: milliseconds('predict.forward'),
    batchRows: numbers['predict.batch_rows']?.number,
  };
}
