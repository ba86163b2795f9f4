// What can go wrong between a client and a served policy.

import grpc from '@grpc/grpc-js';
import { message } from './wire.js';

const ModelError = message('model.v1.ModelError');

// Why there is no answer. `code` is a ModelErrorCode (INVALID_REQUEST, NOT_CONFIGURED, …), a status
// of gRPC (UNAUTHENTICATED, UNAVAILABLE, …), or one of REFUSED (the handshake), TIMEOUT,
// MALFORMED (the answer), LOST and CLOSED (the session). Unless `isRecoverable`, the session is of
// no use any more: close it and connect again.
export class PolicyError extends Error {
  name = 'PolicyError';

  constructor(code, text, { isRecoverable = false, debugInfo = '' } = {}) {
    super(text);
    Object.assign(this, { code, isRecoverable, debugInfo });
  }
}

// The error for a call that makes no sense, of which nothing was sent.
export const misuse = (text) => new PolicyError('INVALID_REQUEST', text, { isRecoverable: true });

// The error for a response that is not of the kind that was asked for.
export function refusal(asked, { kind = 'nothing', error }) {
  if (kind !== 'error') {
    const text = `${kind} does not answer ${asked}`;
    return new PolicyError('MALFORMED', text, { isRecoverable: true });
  }
  const fields = ModelError.toObject(error, { enums: String, defaults: true });
  const code = String(fields.code).replace('MODEL_ERROR_CODE_', '');
  const { is_recoverable: isRecoverable, debug_info: debugInfo } = fields;
  return new PolicyError(code, fields.message, { isRecoverable, debugInfo });
}

// The error for a handshake that failed with a status of gRPC.
export function unreachable({ code, details }, usesTls) {
  // gRPC's library wraps what Node reports about the connection.
  const [, cause = details] = /Last error: (?:Error: )?(.*)\. Resolution note/s.exec(details) ?? [];
  const shown = cause.trim().replace(/\s+/g, ' ');
  const text = {
    [grpc.status.UNAVAILABLE]: `${connectionFailure(shown, usesTls)} (${shown})`,
    [grpc.status.UNAUTHENTICATED]: `${shown.split('; give it')[0]}; give connect the endpoint's `
      + 'token (token; --token-file or RLMESH_RAY_TOKEN of drive_policy.js)',
    [grpc.status.UNIMPLEMENTED]: 'what listens there is no ModelService; check the address, and '
      + `that it serves a policy and no environment (${shown})`,
    [grpc.status.DEADLINE_EXCEEDED]: `no answer in time; check the address (${shown})`,
  }[code];
  return new PolicyError(grpc.status[code], text ?? shown);
}

// What the text of a failed connection means, with the remedy. gRPC has one status for all of them.
function connectionFailure(text, usesTls) {
  const [, meaning] = [
    [/^draining:/, 'the endpoint takes no new sessions and is about to stop; connect to another'],
    [/Name resolution failed/, 'the name of the host is unknown; check the address'],
    [/wrong version number/,
      'what listens there does not use TLS; leave out tlsCa (--tls-ca), or check the address'],
    [/ALTNAME_INVALID/, "the endpoint's certificate is for another host name; connect to a name "
      + 'that the certificate has'],
    [/certificate (has expired|is not yet valid)/, "the endpoint's certificate is out of date, or "
      + "this machine's clock is wrong; have the endpoint show a new one"],
    [/self-signed|unable to|signature/, "the endpoint's certificate was not signed by the "
      + 'authority that is trusted here; name the right one (tlsCa, --tls-ca)'],
    [/^Protocol error/, 'what listens there does not use gRPC; check the address and the port'],
    [/^Failed to connect|ECONNRESET|disconnected| alert /, usesTls
      ? 'the server ended the TLS connection; if it requires a certificate of its clients, give '
        + 'connect one (credentials: grpc.credentials.createSsl(authority, key, certificate)), '
        + 'else check the address'
      : 'the server closed the connection; if it uses TLS, give the authority of its certificate '
        + '(tlsCa, --tls-ca), else check the address'],
  ].find(([pattern]) => pattern.test(text)) ?? [];
  return meaning ?? 'nothing answers there; check the address and that the server runs';
}

// The error for everything outstanding when the stream ends with a status.
export function lost({ code, details }) {
  const why = code === grpc.status.OK ? '' : ` (${grpc.status[code]}: ${details})`;
  return new PolicyError('LOST', `the server ended the session${why}`);
}
