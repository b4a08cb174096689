Feature: Route submission idempotency
  A walker submits a route on an unreliable connection. However often the request arrives,
  the route is planned once, and the walker gets the same response each time.

  Background:
    Given a route service on PostgreSQL
    And Ada is signed in

  # -- the five of the plan

  Scenario: A first submission with a key is accepted
    When she submits a route with a new key
    Then it is accepted with a request id
    And it is no replay
    And 1 route request is kept

  Scenario: The same submission again gets the same response
    Given she has submitted a route with a key
    When she submits the same route with the same key
    Then it is accepted with the same request id
    And it is a replay
    And 1 route request is kept

  Scenario: Another route under the same key is refused
    Given she has submitted a route with a key
    When she submits another route with the same key
    Then it is refused with 409 and "idempotency.payload_mismatch"
    And the refusal shows both hashes

  Scenario: A submission without a key goes through every time
    When she submits a route without a key
    Then it is accepted with a request id
    When she submits a route without a key
    Then it is accepted with another request id
    And 2 route requests are kept

  Scenario Outline: A key that is none is refused
    When she submits a route with the key "<key>"
    Then it is refused with 400 and "idempotency.key_invalid"
    And 0 route requests are kept

    Examples:
      | key                                   |
      | not-a-uuid                            |
      | 7F0F5BD0-4C0A-4B2E-9B0E-0D6D3F9C9A10  |
      | a8098c1a-f86e-11da-bd1a-00112444be1e  |
      | 7f0f5bd04c0a4b2e9b0e0d6d3f9c9a10      |

  # -- what else happens

  Scenario: A conflict leaves nothing and harms nothing
    Given she has submitted a route with a key
    When she submits another route with the same key
    Then it is refused with 409 and "idempotency.payload_mismatch"
    And 1 route request is kept
    When she submits the same route with the same key
    Then it is accepted with the same request id

  Scenario: The same route written in another way is the same route
    Given she has submitted a route with a key
    When she submits the same route, its fields in another order, with the same key
    Then it is accepted with the same request id
    And it is a replay

  Scenario: A key is good until its time is over
    Given she has submitted a route with a key
    When 23.9 hours pass
    And she submits the same route with the same key
    Then it is accepted with the same request id

  Scenario: An expired key starts over
    Given she has submitted a route with a key
    When 24 hours pass
    And she submits another route with the same key
    Then it is accepted with another request id
    And it is no replay
    And 2 route requests are kept

  Scenario: An expired key starts over after the sweep too
    Given she has submitted a route with a key
    When 24 hours pass
    And the expired records are swept
    And she submits the same route with the same key
    Then it is accepted with another request id

  Scenario: Someone else's key is just a key
    Given she has submitted a route with a key
    When Eve submits the same route with the same key
    Then it is accepted with another request id
    And it is no replay
    And Eve cannot look at Ada's request

  Scenario: Nobody gets a replay without signing in
    Given she has submitted a route with a key
    When somebody unknown submits the same route with the same key
    Then it is refused with 401 and "auth.required"

  Scenario Outline: A malformed body takes no key
    When she submits the body <body> with a new key
    Then it is refused with 400 and "request.invalid"
    When she submits a route with that key
    Then it is accepted with a request id
    And 1 route request is kept

    Examples:
      | body                             |
      | {                                |
      | {"minutes":1,"minutes":2}        |
      | {"start":{"lat":1,"lon":2}}      |
      | []                               |

  Scenario: A value that is not allowed takes no key
    When she submits a route of 0 minutes with a new key
    Then it is refused with 422 and "request.invalid"
    When she submits a route with that key
    Then it is accepted with a request id

  Scenario: A record survives a restart
    Given she has submitted a route with a key
    When the service is restarted
    And she submits the same route with the same key
    Then it is accepted with the same request id
    And it is a replay
    When she submits another route with the same key
    Then it is refused with 409 and "idempotency.payload_mismatch"

  Scenario: A record survives a crash of the database
    Given she has submitted a route with a key
    When PostgreSQL is killed and started again
    And she submits the same route with the same key
    Then it is accepted with the same request id

  Scenario: While the database is unavailable the response says when to retry
    Given she has submitted a route with a key
    When PostgreSQL is stopped
    And she submits a route with a new key
    Then it is refused with 503 and "idempotency.store_unavailable"
    And the response says when to retry
    When PostgreSQL is started again
    And she submits a route with that key
    Then it is accepted with another request id
    And 2 route requests are kept

  Scenario: Ten taps at once are one request
    When she submits a route 10 times at once with a new key
    Then all of them are accepted with one request id
    And 1 route request is kept
