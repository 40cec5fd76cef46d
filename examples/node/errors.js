// What a failed call tells beyond its status code: google.rpc's details, in the trailing metadata.

import { fromBinary } from "@bufbuild/protobuf";
import { anyUnpack } from "@bufbuild/protobuf/wkt";
import { status } from "@grpc/grpc-js";

import { BadRequestSchema, RetryInfoSchema } from "./generated/google/rpc/error_details_pb.js";
import { StatusSchema } from "./generated/google/rpc/status_pb.js";

const RETRY_AFTER_MS = 500;

/** The status code and message, and the fields that a BadRequest names. */
export function describe(error) {
  const violations = detailsOf(error, BadRequestSchema)?.fieldViolations ?? [];
  return [
    `${status[error.code]}: ${error.details}`,
    ...violations.map(({ field, description }) => `  ${field}: ${description}`),
  ].join("\n");
}

/** Milliseconds after which trying again may help, or undefined if it will not. */
export function retryDelay(error) {
  if (error.code !== status.UNAVAILABLE && error.code !== status.RESOURCE_EXHAUSTED) return undefined;
  const delay = detailsOf(error, RetryInfoSchema)?.retryDelay;
  return delay ? Number(delay.seconds) * 1000 + delay.nanos / 1e6 : RETRY_AFTER_MS;
}

function detailsOf(error, schema) {
  const [packed] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (!packed) return undefined;
  for (const detail of fromBinary(StatusSchema, packed).details) {
    const found = anyUnpack(detail, schema);
    if (found) return found;
  }
  return undefined;
}
