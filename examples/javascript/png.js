// A PNG of frames, one below the other: each {width, height, data}, data RGB, one byte a sample.

import zlib from 'node:zlib';

export function encodePng(frames) {
  const [{ width }] = frames;
  const pixels = Buffer.concat(frames.map(({ data }) => data));
  const stride = 3 * width;
  const height = pixels.length / stride;
  const noFilter = Buffer.of(0);
  const rows = Array.from({ length: height }, (_, y) =>
    Buffer.concat([noFilter, pixels.subarray(y * stride, (y + 1) * stride)]));
  const header = Buffer.of(...uint32(width), ...uint32(height), 8, 2, 0, 0, 0); // 8 bits, RGB
  return Buffer.concat([
    Buffer.of(0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a),
    chunk('IHDR', header),
    chunk('IDAT', zlib.deflateSync(Buffer.concat(rows))),
    chunk('IEND', Buffer.alloc(0)),
  ]);
}

function chunk(name, data) {
  const body = Buffer.concat([Buffer.from(name), data]);
  return Buffer.concat([uint32(data.length), body, uint32(zlib.crc32(body))]);
}

const uint32 = (number) => Buffer.of(number >>> 24, number >>> 16, number >>> 8, number);
