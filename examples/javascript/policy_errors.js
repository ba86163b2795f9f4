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
export function unreachable({ code, details }) {
  const meaning = {
    [grpc.status.UNAVAILABLE]: 'nothing answers there; check the address and that the server runs',
    [grpc.status.UNIMPLEMENTED]: 'what listens there is no ModelService; check the address',
    [grpc.status.DEADLINE_EXCEEDED]: 'no answer in time; check the address',
  }[code];
  return new PolicyError(grpc.status[code], meaning ? `${meaning} (${details})` : details);
}

// The error for everything outstanding when the stream ends with a status.
export function lost({ code, details }) {
  const why = code === grpc.status.OK ? '' : ` (${grpc.status[code]}: ${details})`;
  return new PolicyError('LOST', `the server ended the session${why}`);
}
