// What both sides of a handshake mean: the generation of the wire, the editions of its workflow.

export const GENERATION = 'rlmesh.protocol.v1';
export const VERSION = '0.1.0'; // of these programs, for logs
export const EDITIONS = [ // oldest first
  {
    name: '2026.06',
    sha256: '3827ecdfb7ad3c756c88587101675a412083252027720e4d0f7daa588f431d1e',
    status: 'provisional',
  },
];

// Whether `sha256` is that of another text of a provisional edition: then one name would mean two
// contracts. A peer that does not say is trusted.
export const isOtherText = ({ status, sha256 }, shown) =>
  status === 'provisional' && Boolean(shown) && shown !== sha256;
