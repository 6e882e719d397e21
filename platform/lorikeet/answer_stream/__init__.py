"""The way back of an answer: the engine's tokens become the client's bytes and reach its gateway.

    replica                                                     gateway
    ───────                                                     ───────
    the engine's outputs, one message a step
       │
    AnswerSender        one a call                              ReplicaResponse ──► the client
       │                                                           ▲ bytes, unread
    Answer              counts its choices to their end            │
       ├ ChoiceStream   one a choice:                           ResponseBuffer     one a call
       │   Detokenizer    ids → text, stop strings                 ▲ joins what comes faster than
       │   reasoning      text → what is thought before it         │ the gateway can pass it on
       │   tool_calls     text → calls                             │
       │   logprobs                                                │
       ├ PromptLogprobsJson  a prompt, where its tokens'            │
       │                logprobs are asked for                     │
       └ …_format  the API's shape: the client's bytes           ResponseBuffers
       │                                                           ▲ delivers by request
       ▼            one message: a DeltaGroup of each answer       │
    ResponseStream ════════════════════════════════════════════════╛
     one a gateway      kept open by serving/replica_calls.py

The call itself (`Replica.run_call`) goes another way, and says only who has taken it and that it
has ended. A step of the engine adds a delta to every answer; a call of Ray Serve for each delta
would cost a replica's event loop 70 us, more than all the rest, so all that is new for one gateway
goes there together.

An answer's items are an AnswerHeader, a second one before the first bytes, bytes, now and then a
RunningUsage, and before the last bytes a FinalUsage; or a Refusal in place of what would follow.
Answer knows when it has ended; that goes along in its last DeltaGroup. What has not ended when its
call has is lost, and not made again: its own size may have broken the stream.
"""
