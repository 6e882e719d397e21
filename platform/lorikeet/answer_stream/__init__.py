"""Path of an answer: from the engine's tokens to the client's bytes at a gateway.

    replica                                                     gateway
    ───────                                                     ───────
    the engine's outputs, one message a step
       │
    AnswerSender        one a call                              ReplicaResponse ──► the client
       │                                                           ▲ bytes, unread
    Answer              all choices, until the last ends           │
       ├ ChoiceStream   one a choice:                           ResponseBuffer     one a call
       │   Detokenizer    ids → text, stop strings                 ▲ joins deltas that come faster
       │   reasoning      text → thinking and answer               │ than the gateway sends them
       │   tool_calls     text → tool calls                        │
       │   logprobs_format                                         │
       ├ PromptLogprobsJson   one a prompt, where                  │
       │                  prompt logprobs are asked for            │
       └ …_format  JSON or SSE of the called API                ResponseBuffers
       │                                                           ▲ delivers by request id
       ▼            one message: a DeltaGroup of each answer       │
    ResponseStream ════════════════════════════════════════════════╛
     one a gateway      kept open by serving/replica_calls.py

`Replica.run_call` returns no part of the answer, only which replica has taken the call and that the
call has ended. A step of the engine adds a delta to every answer. One Ray Serve call for each delta
would cost more than all other work on the delta, so all deltas for one gateway travel in one
message.

An answer's items are an AnswerHeader, a second AnswerHeader before the first bytes, bytes, now and
then a RunningUsage, and a FinalUsage before the last bytes. In an answer that fails, a Refusal
replaces the remaining items. The last DeltaGroup of an answer is marked as its end. An answer whose
call has ended before that mark came is lost and not repeated.

With the items of a DeltaGroup comes the log of the engine's outputs that they were made of
(output_log.py). If the replica is lost, another replica gets the log and goes on with the answer.
"""
