// A @grpc/grpc-js client for a service that protoc-gen-es has described. Knows nothing of Slipstream.

import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import { makeGenericClientConstructor } from "@grpc/grpc-js";

/**
 * Opens one connection for all calls of a service. Requests are plain objects in the messages' shape.
 *
 * A unary method returns a promise of the answer; a streaming one a readable stream of messages, for
 * `for await`, with a `cancel()` of its own. Both take gRPC's call options, such as `deadline`.
 */
export function connect(service, address, credentials, options) {
  const Client = makeGenericClientConstructor(definition(service), service.typeName);
  const client = new Client(address, credentials, options);
  const calls = { close: () => client.close() };
  for (const { localName, methodKind } of service.methods) {
    calls[localName] =
      methodKind === "unary" ? unary(client, localName) : (request, options) => client[localName](request, options);
  }
  return calls;
}

function definition(service) {
  return Object.fromEntries(
    service.methods.map(({ localName, name, methodKind, input, output }) => [
      localName,
      {
        path: `/${service.typeName}/${name}`,
        requestStream: methodKind === "client_streaming" || methodKind === "bidi_streaming",
        responseStream: methodKind === "server_streaming" || methodKind === "bidi_streaming",
        requestSerialize: serialize(input),
        requestDeserialize: deserialize(input),
        responseSerialize: serialize(output),
        responseDeserialize: deserialize(output),
      },
    ]),
  );
}

const serialize = (schema) => (message) => Buffer.from(toBinary(schema, create(schema, message)));
const deserialize = (schema) => (bytes) => fromBinary(schema, bytes);

function unary(client, name) {
  return (request, options = {}) =>
    new Promise((resolve, reject) => {
      client[name](request, options, (error, response) => (error ? reject(error) : resolve(response)));
    });
}
