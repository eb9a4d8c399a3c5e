// Flags for transfers by copy engines (crosscut/kernels/copies.py). Compiled at the end of exchange.cu, whose Call and
// Patience it uses: `mail` holds every rank's shared memory, `epochs` this rank's two counters, one for each half.
//
// Each kernel is one warp whose lane p speaks with rank p. In the memory of each rank, from `flags_at` on, all u32:
//   ready[half][piece][source]   which call of this half `source` had reached when it put the piece into its own memory
//   done[half][reader]           the last call of this half whose pieces `reader` has all read from here
// Counters live on the GPU and grow with every call, so a CUDA graph can replay any of this between eager calls.

#define PIECES 16

__device__ __forceinline__ u32* ready_flag(const Call& c, u32 owner, u32 half, u32 piece, u32 source) {
    return (u32*)(c.mail[owner] + c.flags_at) + (half * PIECES + piece) * N + source;
}
__device__ __forceinline__ u32* done_flag(const Call& c, u32 owner, u32 half, u32 reader) {
    return (u32*)(c.mail[owner] + c.flags_at) + 2 * PIECES * N + half * N + reader;
}
__device__ __forceinline__ void tell(u32* flag, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ void hear(const Call& c, const u32* flag, u32 value, u32 peer) {
    Patience patience;
    while (true) {
        u32 seen;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        if ((int)(seen - value) >= 0 || patience.give_up(c, value, peer)) return;
    }
}

// Begin a call in `half`: every peer has read what the last call there held.
__device__ __forceinline__ void claim(const Call& c, u32 half) {
    u32 before = c.epochs[half], peer = threadIdx.x;
    if (peer < N && peer != c.rank) hear(c, done_flag(c, c.rank, half, peer), before, peer);
    __syncwarp();
    if (peer == 0) c.epochs[half] = before + 1;
}
// The piece stands in this rank's memory; the kernels and copies that wrote it are before this one on the stream.
__device__ __forceinline__ void publish(const Call& c, u32 half, u32 piece) {
    u32 peer = threadIdx.x;
    __threadfence_system();
    if (peer < N && peer != c.rank) tell(ready_flag(c, peer, half, piece, c.rank), c.epochs[half]);
}
// The piece stands in `peer`'s memory.
__device__ __forceinline__ void arrive(const Call& c, u32 half, u32 piece, u32 peer) {
    if (threadIdx.x == 0) hear(c, ready_flag(c, c.rank, half, piece, peer), c.epochs[half], peer);
}
// All pieces of the call have been read; the copies that read them are before this one on the stream.
__device__ __forceinline__ void leave(const Call& c, u32 half) {
    u32 peer = threadIdx.x;
    __threadfence_system();
    if (peer < N && peer != c.rank) tell(done_flag(c, peer, half, c.rank), c.epochs[half]);
}

// `total_bytes` carries half, piece and peer, a byte each; above them anything but 0 means: load the kernel and do nothing.
#define STEP(name, ...) KERNEL(copies_##name, 32, (total_bytes >> 24 ? (void)0 : __VA_ARGS__))
STEP(claim, claim(c, total_bytes & 255))
STEP(publish, publish(c, total_bytes & 255, total_bytes >> 8 & 255))
STEP(arrive, arrive(c, total_bytes & 255, total_bytes >> 8 & 255, total_bytes >> 16 & 255))
STEP(leave, leave(c, total_bytes & 255))
