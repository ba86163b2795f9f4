// The handshake with a ModelService, as its client.

import { EDITIONS, GENERATION, isOtherText, VERSION } from './edition.js';
import { PolicyError, unreachable } from './policy_errors.js';
import { message, pack } from './wire.js';

export const SERVICE = 'rlmesh.model.v1.ModelService';
const CAPABILITIES = { 'rlmesh.spaces.core.v1': '' };

export const asIs = (bytes) => bytes; // frames come and go as bytes

// Returns the server's answer, which fits.
export async function shakeHands(channel, metadata, timeoutMs, usesTls) {
  const newest = EDITIONS.at(-1);
  const frame = pack(message('model.v1.HandshakeRequest'), {
    protocol_generation: GENERATION,
    client_name: 'rlmesh-javascript-example',
    client_version: VERSION,
    capabilities: CAPABILITIES,
    supported_workflow_editions: EDITIONS.map(({ name }) => name),
    offered_edition_spec_sha256: newest.sha256,
    offered_edition_status: newest.status,
  });
  const bytes = await new Promise((resolve, reject) => {
    const options = { deadline: Date.now() + timeoutMs };
    const respond = (error, reply) =>
      (error ? reject(unreachable(error, usesTls)) : resolve(reply));
    const path = `/${SERVICE}/Handshake`;
    channel.makeUnaryRequest(path, asIs, asIs, frame, metadata, options, respond);
  });
  let answer;
  try {
    answer = message('model.v1.HandshakeResponse').decode(bytes);
  } catch (error) {
    const text = `the answer to the handshake makes no sense: ${error.message}`;
    throw new PolicyError('REFUSED', text);
  }
  const objection = objectionTo(answer);
  if (objection) throw new PolicyError('REFUSED', objection);
  return answer;
}

function objectionTo(answer) {
  const theirs = [answer.server_protocol_generation, answer.min_supported_protocol_generation];
  if (!answer.compatible) {
    const supported = answer.supported_workflow_editions.join(', ') || 'none';
    const says = answer.error_message || 'no reason given';
    return `the server (${theirs[0]}, editions: ${supported}) refuses this client: ${says}`;
  }
  if (theirs[0] && !theirs.includes(GENERATION)) {
    return `the server speaks ${theirs[0]}, this client ${GENERATION}`;
  }
  const name = answer.selected_workflow_edition;
  const edition = EDITIONS.find((own) => own.name === name);
  if (!edition) return `the server selected edition '${name}', which was not offered`;
  const text = answer.selected_edition_spec_sha256;
  return isOtherText(edition, text) ? `the server means another text of ${name}: ${text}` : '';
}
