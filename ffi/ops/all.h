// The list of operations. Both backends, the Python primitives and the tests are made from it.
#pragma once

#include "ops/clear.h"
#include "ops/combine_rows.h"
#include "ops/divide_weights.h"
#include "ops/erase_slots.h"
#include "ops/export_slots.h"
#include "ops/find_rows.h"
#include "ops/find_slots.h"
#include "ops/gather_or_init_rows.h"
#include "ops/gather_rows.h"
#include "ops/list_occurrences.h"
#include "ops/pool_rows.h"
#include "ops/read_slots.h"
#include "ops/route_keys.h"
#include "ops/square_norm.h"
#include "ops/tally.h"
#include "ops/unique.h"
#include "ops/update_rows.h"
#include "ops/upsert.h"
#include "ops/verify_slots.h"
#include "ops/write_rows.h"

namespace hkv {

template <class... Operations>
struct OperationList {
  template <class Visitor>
  static void visit(Visitor visitor) {
    (visitor.template operator()<Operations>(), ...);
  }
};

using AllOperations =
    OperationList<Unique, ListOccurrences, FindSlots, FindRows, VerifySlots, Upsert, EraseSlots, Clear,
                  ReadSlots, ExportSlots, GatherRows, PoolRows, DivideWeights, FillRows, ScatterRows,
                  InitRows, GatherOrInitRows, CombineRows, SquareNorm, UpdateRows<SgdRule>,
                  UpdateRows<MomentumRule>, UpdateRows<AdagradRule>, UpdateRows<RowwiseAdagradRule>,
                  UpdateRows<AdamRule>, UpdateRows<RowwiseAdamRule>, UpdateRows<FtrlRule>, RouteKeys, Tally>;

}  // namespace hkv
